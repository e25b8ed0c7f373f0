"""Experts in host memory: which of a layer's are on the device as well, and how each of the others is served."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

DECAY = 0.98  # of an expert's score from one step to the next: what was chosen 34 steps ago counts half
MARGIN = 1.25  # as much higher an expert's score must be than that of the resident one that it replaces
LEAST = 0.5  # and so much


class Costs(NamedTuple):
    """Seconds on this rank, measured at the start (offload.py)."""

    read: float  # of a byte of weights that the CPU computes with
    compute: float  # of a multiply-add on the CPU
    copy: float  # of a byte of weights to the device

    def streamed(self, missing: np.ndarray, tokens: np.ndarray, size: int, itemsize: int) -> np.ndarray:
        """Which of the missing experts are copied to the device; the CPU computes the others meanwhile.

        missing: experts. tokens: of each of these. size: elements of an expert's matrices. The CPU's time for an expert
        grows with its tokens and a copy's does not, so those with the most tokens are copied: as many as make the
        longer of the two as short as can be.
        """
        order = np.argsort(-tokens, kind="stable")
        cpu = np.maximum(size * itemsize * self.read, tokens[order] * (size * self.compute))
        left = np.concatenate((np.cumsum(cpu[::-1])[::-1], [0.0]))  # of the CPU, where the first n are copied
        copies = np.arange(len(order) + 1) * (size * itemsize * self.copy)
        return missing[order[: int(np.argmin(np.maximum(left, copies)))]]


class Residents:
    """A layer's resident set: a score for each expert, and who has which slot. It knows of no memory."""

    def __init__(self, experts: int, slots: int):
        self.slots = slots
        self.slot_of = np.full(experts, -1)  # of each expert; -1: not resident
        self.expert_in = np.arange(slots)  # of each slot
        self.slot_of[:slots] = np.arange(slots)
        self._scores = np.zeros(experts)

    def observe(self, counts: np.ndarray) -> None:
        """counts [experts]: of tokens that have chosen each in this step."""
        self._scores *= DECAY
        self._scores += counts > 0

    def exchange(self) -> tuple[int, int] | None:
        """The expert that should become resident, and the slot of the one that it should replace."""
        if not 0 < self.slots < len(self._scores):
            return None
        outside = np.where(self.slot_of < 0, self._scores, -1.0)
        expert, held = int(outside.argmax()), self._scores[self.expert_in]
        slot = int(held.argmin())
        return (expert, slot) if outside[expert] > MARGIN * held[slot] + LEAST else None

    def least(self, spared: np.ndarray) -> int:
        """The slot of the expert with the lowest score that is not spared; -1: all are. spared: [experts] bool."""
        if not self.slots:
            return -1
        held = np.where(spared[self.expert_in], np.inf, self._scores[self.expert_in])
        slot = int(held.argmin())
        return slot if held[slot] < np.inf else -1

    def leave(self, slot: int) -> int:
        """Its expert is no longer resident; which one it was."""
        expert = int(self.expert_in[slot])
        self.slot_of[expert] = -1
        return expert

    def enter(self, expert: int, slot: int) -> None:
        """The slot, which nobody has, holds an expert now."""
        self.expert_in[slot], self.slot_of[expert] = expert, slot
