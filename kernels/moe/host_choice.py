"""How a step's experts are served that are in host memory: host_experts.cpp, in one call."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..cpp import ops

DECAY = 0.995  # of an expert's score from one step to the next: what was chosen 138 steps ago counts half
# Ways: by the costs; all that are not resident on the CPU; all of them copied; all on the CPU, and of those that are to
# become resident one is copied as well, next to that.
CHEAPEST, ON_CPU, COPIED, ADOPTED = 0, 1, 2, 3
# The margin by which an expert's score must be above that of the resident one that it replaces: NOISE standard
# deviations of the difference, where both are chosen by chance, and LEAST. With less, chance alone exchanges experts in
# every layer, and each exchange is a copy.
NOISE = 1.5
LEAST = 0.5


TIMED_ROWS = 1, 4, 16, 64  # of an expert, whose seconds on the CPU are measured; as in host_experts.cpp


class Costs(NamedTuple):
    """Seconds of one expert on this rank."""

    cpu: tuple[float, ...]  # on the CPU, of TIMED_ROWS tokens
    copy: float  # to the device
    cpu_overlapped: float = 1.0  # how many times as long the CPU takes while copies run, as both read the same memory
    copy_overlapped: float = 1.0  # and copies while the CPU computes

    def of_rows(self, rows: np.ndarray) -> np.ndarray:
        """On the CPU, of so many tokens: in between what was timed, and beyond the last in proportion."""
        most = TIMED_ROWS[-1]
        return np.where(rows > most, self.cpu[-1] * (rows / most), np.interp(rows, TIMED_ROWS, self.cpu))


class Residency(NamedTuple):
    """Which experts are on the device as well, as `choose` reads and changes it. Fixed experts are not among them."""

    slot_of: np.ndarray  # [experts] int64; -1: not resident
    scores: np.ndarray  # [experts] f64: they grow with each step that chooses an expert, and decay
    expert_in: np.ndarray  # [slots] int64; of a slot that is not to be used, an expert that is not resident

    @classmethod
    def of_first(cls, experts: int, slots: int) -> Residency:
        """So many experts, of which the first ones are in the slots."""
        numbers = np.arange(experts)
        return cls(np.where(numbers < slots, numbers, -1), np.zeros(experts), np.arange(slots))

    @property
    def slots(self) -> int:
        return len(self.expert_in)

    def exchange(self) -> tuple[int, int] | None:
        """The expert that should become resident, and the slot of the one that it should replace."""
        if not 0 < self.slots < len(self.scores):
            return None
        outside = np.where(self.slot_of < 0, self.scores, -1.0)
        expert, inside = int(outside.argmax()), self.scores[self.expert_in]
        slot = int(inside.argmin())
        return (expert, slot) if above(outside[expert], inside[slot]) else None

    def replace(self, slot: int, expert: int) -> int:
        """The slot holds this expert now; which one it held before."""
        before = int(self.expert_in[slot])
        self.slot_of[before], self.slot_of[expert], self.expert_in[slot] = -1, slot, expert
        return before


class Choice:
    """The choice for a layer's E experts in host memory; each step's takes the place of the one before."""

    def __init__(self, experts: int, first: int, costs: Costs, mode: int, fixed: int = 0):
        """first: the router's number of expert 0. fixed: experts that are on the device alone, those just before it;
        they are counted with the resident ones."""
        self.first, self.costs, self.mode = first, costs, mode
        counts = np.zeros(experts + fixed, np.int64)  # routed tokens of each expert
        self.counts, self.of_fixed = counts[:experts], counts[experts:]  # the same memory
        self.cpu = np.full(experts, -1)  # an expert's own number where the CPU computes it; else -1
        # How many are resident or fixed, on the CPU, copied; routed tokens of those on the CPU; how many of the copied
        # become resident.
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
        ops.refuse_recording("the host chooses how experts in its memory are served")
        key = ids.data_ptr(), ids.numel(), limit, adopts, *(one.ctypes.data for one in of), self.costs
        if key != self._key:
            self._key, self._call = key, ops.call_array([self.call(ids, of, limit, adopts)])
        ops.run_calls(self._call, 1, 1)

    def call(
        self, ids: Tensor, of: Residency, limit: int, adopts: bool, mode: int | None = None, lag: Tensor | None = None
    ) -> tuple[int, bytes]:
        """The operation as ops.call_array takes it. The tensors have to stay. mode: instead of `mode`. lag [1] f64:
        in the place of `lag`."""
        mode, lag = self.mode if mode is None else mode, torch.from_numpy(self.lag) if lag is None else lag
        experts, fixed = len(self.counts), len(self.of_fixed)
        sizes = ids.numel(), experts, len(of.expert_in), self.first, mode, limit, int(adopts), fixed
        costs = (
            *self.costs.cpu,
            self.costs.copy,
            self.costs.cpu_overlapped,
            self.costs.copy_overlapped,
            DECAY,
            NOISE,
            LEAST,
        )
        tensors = ids, *map(torch.from_numpy, of), *self.results, lag
        return ops.op("host_experts", "choose_experts").address, ops.pack((*tensors, *sizes, *map(float, costs)))


def above(score: float, other: float) -> bool:
    """Whether an expert is chosen so much more often that it should take the other's place."""
    return score - other > NOISE * math.sqrt(score + other) + LEAST
