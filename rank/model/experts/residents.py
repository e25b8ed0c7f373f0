"""Experts in host memory: which of a layer's are on the device as well. Fixed experts are not among them."""

from __future__ import annotations

import numpy as np

from ....kernels.moe.host_choice import Residency, above


class Residents:
    """A layer's resident set: a score for each expert, and who has which slot. It knows of no memory."""

    def __init__(self, experts: int, slots: int):
        self.slots = slots
        self.slot_of = np.full(experts, -1)  # of each expert; -1: not resident
        self.expert_in = np.arange(slots)  # of each slot
        self.slot_of[:slots] = np.arange(slots)
        self.scores = np.zeros(experts)  # host_choice.py has them grow and decay

    @property
    def arrays(self) -> Residency:
        """The same memory, for `Choice`."""
        return Residency(self.slot_of, self.scores, self.expert_in)

    def exchange(self) -> tuple[int, int] | None:
        """The expert that should become resident, and the slot of the one that it should replace."""
        if not 0 < self.slots < len(self.scores):
            return None
        outside = np.where(self.slot_of < 0, self.scores, -1.0)
        expert, held = int(outside.argmax()), self.scores[self.expert_in]
        slot = int(held.argmin())
        return (expert, slot) if above(outside[expert], held[slot]) else None

    def least(self, spared: np.ndarray) -> int:
        """The slot of the expert with the lowest score that is not spared; -1: all are. spared: [experts] bool."""
        if not self.slots:
            return -1
        held = np.where(spared[self.expert_in], np.inf, self.scores[self.expert_in])
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
