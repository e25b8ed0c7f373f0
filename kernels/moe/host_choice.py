"""How a step's experts are served that are in host memory: host_experts.cpp, in one call; numpy is its reference."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..cpp import ops

DECAY = 0.995  # of an expert's score from one step to the next: what was chosen 138 steps ago counts half
# Ways: by the costs; all that are not resident on the CPU; all of them copied; all on the CPU, and of those that are to
# become resident one is copied as well, beside that.
CHEAPEST, ON_CPU, COPIED, ADOPTED = 0, 1, 2, 3
# By how much an expert's score must be above that of the resident one that it replaces: NOISE standard deviations of
# the difference, where both are chosen by chance, and LEAST. With less, chance alone exchanges experts in every layer,
# and each exchange is a copy.
NOISE = 1.5
LEAST = 0.5


TIMED_ROWS = 1, 4, 16, 64  # of an expert, whose seconds on the CPU are measured; as in host_experts.cpp


class Costs(NamedTuple):
    """Seconds of one expert on this rank."""

    cpu: tuple[float, ...]  # on the CPU, of TIMED_ROWS tokens
    copy: float  # to the device
    cpu_beside: float = 1.0  # how many times as long the CPU takes while copies run, as both read the same memory
    copy_beside: float = 1.0  # and copies while the CPU computes

    def of_rows(self, rows: np.ndarray) -> np.ndarray:
        """On the CPU, of so many tokens: in between what was timed, and beyond the last in proportion."""
        most = TIMED_ROWS[-1]
        return np.where(rows > most, self.cpu[-1] * (rows / most), np.interp(rows, TIMED_ROWS, self.cpu))

    def both(self, cpu: np.ndarray, copies: np.ndarray) -> np.ndarray:
        """What both take that begin together: who is left has all of the memory."""
        cpu, copies = cpu * self.cpu_beside, copies * self.copy_beside
        shorter = np.minimum(cpu, copies)
        return shorter + (cpu - shorter) / self.cpu_beside + (copies - shorter) / self.copy_beside


class Residency(NamedTuple):
    """Which experts are on the device as well, as `choose` reads and changes it."""

    slot_of: np.ndarray  # [experts] int64; -1: not resident
    scores: np.ndarray  # [experts] f64
    expert_in: np.ndarray  # [slots] int64; of a slot that is not to be used, an expert that is not resident


class Choice:
    """Of a layer's E experts in host memory; each step's takes the place of the one before."""

    def __init__(self, experts: int, first: int, costs: Costs, way: int, fixed: int = 0):
        """first: the router's number of expert 0. fixed: experts that are on the device alone, those just before it;
        they are counted with the resident ones."""
        self.first, self.costs, self.way = first, costs, way
        counts = np.zeros(experts + fixed, np.int64)  # pairs of a token and each expert
        self.counts, self.of_fixed = counts[:experts], counts[experts:]  # the same memory
        self.cpu = np.full(experts, -1)  # an expert's own number where the CPU computes it; else -1
        # How many are resident or fixed, on the CPU, copied; pairs of those on the CPU; how many of the copied become
        # resident.
        self.found = np.zeros(5, np.int64)
        self._copied, self._adopted = np.zeros(experts, np.int64), np.zeros(experts, np.int64)
        self.lag = np.zeros(1)  # seconds that copies take besides, however many they are
        self.on_cpu = torch.from_numpy(self.cpu)  # the same memory
        self._key: tuple[object, ...] = ()  # of the call that is kept: decode steps make the same again and again
        results = counts, self.cpu, self._copied, self._adopted, self.found
        self.results = [torch.from_numpy(one) for one in results]  # the same memory, as C++ fills it

    @property
    def copied(self) -> np.ndarray:
        """The experts that are copied to the device."""
        return self._copied[: self.found[2]]

    @property
    def adopted(self) -> np.ndarray:
        """The slots that these have from the next step on; -1: none."""
        return self._adopted[: self.found[2]]

    def choose(self, ids: Tensor, of: Residency, limit: int = 1 << 30, adopts: bool = False) -> None:
        """ids int32 [T, k], contiguous. Scores of the experts that are chosen grow, and all decay. limit: copies at
        most, where costs decide. adopts: copied experts take slots of others that are chosen less often."""
        if not ops.available():
            return self._choose_reference(ids, of, limit, adopts)
        key = ids.data_ptr(), ids.numel(), limit, adopts, *(one.ctypes.data for one in of), self.costs
        if key != self._key:
            self._key, self._call = key, ops.call_array([self.call(ids, of, limit, adopts)])
        ops.run_calls(self._call, 1, 1)
        return None

    def call(
        self, ids: Tensor, of: Residency, limit: int, adopts: bool, way: int | None = None, lag: Tensor | None = None
    ) -> tuple[int, bytes]:
        """The operation as ops.call_array takes it. The tensors have to stay. way: another one than `way`. lag [1] f64:
        in the place of `lag`."""
        way, lag = self.way if way is None else way, torch.from_numpy(self.lag) if lag is None else lag
        experts, fixed = len(self.counts), len(self.of_fixed)
        sizes = ids.numel(), experts, len(of.expert_in), self.first, way, limit, int(adopts), fixed
        costs = *self.costs.cpu, self.costs.copy, self.costs.cpu_beside, self.costs.copy_beside, DECAY, NOISE, LEAST
        tensors = ids, *map(torch.from_numpy, of), *self.results, lag
        return ops.op("host_experts", "choose_experts").address, ops.pack((*tensors, *sizes, *map(float, costs)))

    def _choose_reference(self, ids: Tensor, of: Residency, limit: int, adopts: bool) -> None:
        local = ids.numpy().reshape(-1) - self.first
        experts, fixed = len(self.counts), len(self.of_fixed)
        self.of_fixed[:] = np.bincount(local[(local >= -fixed) & (local < 0)] + fixed, minlength=fixed)
        self.counts[:] = np.bincount(local[(local >= 0) & (local < experts)], minlength=experts)
        of.scores[:] = of.scores * DECAY + (self.counts > 0)
        chosen = np.flatnonzero((self.counts > 0) & (of.slot_of < 0))
        most, fewest = len(chosen) if self.way == COPIED else 0, 0
        if self.way == CHEAPEST:
            chosen = chosen[np.argsort(-self.counts[chosen], kind="stable")]
        if self.way in (CHEAPEST, ADOPTED) and adopts and len(chosen) and limit > 0:
            wanted = chosen[of.scores[chosen].argmax()]
            if self._slot_for(wanted, of) >= 0:
                chosen, fewest = np.concatenate(([wanted], chosen[chosen != wanted])), 1
        if self.way == CHEAPEST:
            cpu = self.costs.of_rows(self.counts[chosen])
            left = np.concatenate((np.cumsum(cpu[::-1])[::-1], [0.0]))  # of the CPU, where the first n are copied
            copies = np.arange(len(chosen) + 1)
            both = self.costs.both(left, copies * self.costs.copy + (copies > 0) * self.lag)
            most = fewest + int(np.argmin(both[fewest : limit + 1]))
        here = chosen[most:]  # on the CPU
        if self.way == ADOPTED:
            most = fewest
        self._copied[: len(chosen)] = chosen
        self.cpu[:] = -1
        self.cpu[here] = here
        for i, expert in enumerate(chosen[:most].tolist()):
            slot = self._adopted[i] = self._slot_for(expert, of) if adopts else -1
            if slot >= 0:
                of.slot_of[of.expert_in[slot]] = -1
                of.expert_in[slot], of.slot_of[expert] = expert, slot
        resident, made = int((self.counts > 0).sum()) - len(chosen), int((self._adopted[:most] >= 0).sum())
        resident += int((self.of_fixed > 0).sum())
        self.found[:] = resident, len(here), most, self.counts[here].sum(), made

    def _slot_for(self, expert: int, of: Residency) -> int:
        """The slot whose expert has the lowest score, of those that no token has chosen, if it is far below that of
        `expert`; else -1."""
        held = of.expert_in
        spared = (of.slot_of[held] != np.arange(len(held))) | (self.counts[held] > 0)
        scores = np.where(spared, np.inf, of.scores[held])
        if not len(held) or scores.min() == np.inf:
            return -1
        slot = int(scores.argmin())
        return slot if above(of.scores[expert], scores[slot]) else -1


def above(score: float, other: float) -> bool:
    """Whether an expert is chosen so much more often that it should take the other's place."""
    return score - other > NOISE * math.sqrt(score + other) + LEAST
