"""How a step's experts are served that are in host memory: host_experts.cpp, in one call; numpy is its reference."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..cpp import ops

DECAY = 0.995  # of an expert's score from one step to the next: what was chosen 138 steps ago counts half
CHEAPEST, ON_CPU, COPIED = 0, 1, 2  # ways: by the costs; all that are not resident on the CPU; all of them copied


TIMED_ROWS = 1, 4, 16, 64  # of an expert, whose seconds on the CPU are measured; as in host_experts.cpp


class Costs(NamedTuple):
    """Seconds of one expert on this rank."""

    cpu: tuple[float, ...]  # on the CPU, of TIMED_ROWS tokens
    copy: float  # to the device

    def of_rows(self, rows: np.ndarray) -> np.ndarray:
        """On the CPU, of so many tokens: in between what was timed, and beyond the last in proportion."""
        most = TIMED_ROWS[-1]
        return np.where(rows > most, self.cpu[-1] * (rows / most), np.interp(rows, TIMED_ROWS, self.cpu))


class Choice:
    """Of a layer's E experts; each step's takes the place of the one before."""

    def __init__(self, experts: int, first: int, costs: Costs, way: int):
        """first: the router's number of expert 0."""
        self.first, self.costs, self.way = first, costs, way
        self.counts = np.zeros(experts, np.int64)  # pairs of a token and each expert
        self.cpu = np.full(experts, -1)  # an expert's own number where the CPU computes it; else -1
        self.found = np.zeros(4, np.int64)  # how many are resident, on the CPU, copied; pairs of those on the CPU
        self._copied = np.zeros(experts, np.int64)
        self.on_cpu = torch.from_numpy(self.cpu)  # the same memory
        self._key: tuple[object, ...] = ()  # of the call that is kept: decode steps make the same again and again
        self._results = [torch.from_numpy(one) for one in (self.counts, self.cpu, self._copied, self.found)]

    @property
    def copied(self) -> np.ndarray:
        """The experts that are copied to the device."""
        return self._copied[: self.found[2]]

    def choose(self, ids: Tensor, slot_of: np.ndarray, scores: np.ndarray, limit: int = 1 << 30) -> None:
        """ids int32 [T, k], contiguous. slot_of [E] int64: -1 of those that are not resident. scores [E] f64: those of
        the experts that are chosen grow, and all decay. limit: copies at most, where costs decide."""
        if not ops.available():
            return self._choose_reference(ids, slot_of, scores, limit)
        key = ids.data_ptr(), ids.numel(), limit, slot_of.ctypes.data, scores.ctypes.data, self.costs
        if key != self._key:
            of = torch.from_numpy(slot_of), torch.from_numpy(scores)
            sizes = ids.numel(), len(self.counts), self.first, self.way, limit
            one = ops.op("host_experts", "choose_experts")
            costs = map(float, (*self.costs.cpu, self.costs.copy, DECAY))
            call = one.address, ops.pack((ids, *of, *self._results, *sizes, *costs))
            self._key, self._call = key, ops.call_array([call])
        ops.run_calls(self._call, 1, 1)
        return None

    def _choose_reference(self, ids: Tensor, slot_of: np.ndarray, scores: np.ndarray, limit: int) -> None:
        local = ids.numpy().reshape(-1) - self.first
        experts = len(self.counts)
        self.counts[:] = np.bincount(local[(local >= 0) & (local < experts)], minlength=experts)
        scores *= DECAY
        scores += self.counts > 0
        chosen = np.flatnonzero((self.counts > 0) & (slot_of < 0))
        most = len(chosen) if self.way == COPIED else 0
        if self.way == CHEAPEST:
            chosen = chosen[np.argsort(-self.counts[chosen], kind="stable")]
            cpu = self.costs.of_rows(self.counts[chosen])
            left = np.concatenate((np.cumsum(cpu[::-1])[::-1], [0.0]))  # of the CPU, where the first n are copied
            both = np.maximum(left, np.arange(len(chosen) + 1) * self.costs.copy)
            most = int(np.argmin(both[: limit + 1]))
        self._copied[: len(chosen)] = chosen
        self.cpu[:] = -1
        self.cpu[chosen[most:]] = chosen[most:]
        resident = int((self.counts > 0).sum()) - len(chosen)
        self.found[:] = resident, len(chosen) - most, most, self.counts[chosen[most:]].sum()
