"""Memory that ranks of a host share, over which they add up: what comm/shm.py makes of it. shm_allreduce.cpp is the
protocol; it waits without the interpreter's lock."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..cpp import ops

LINE = 8  # counts are a cache line each


@dataclass
class ShmAllReduce:
    """Sums of f32, equal on all ranks. Every rank makes the same calls."""

    slots: Tensor  # [2, ranks, most elements] f32
    counts: Tensor  # [ranks * LINE] int64, zeros before the first call
    rank: int
    # [1] int64: this rank's calls. In memory, as a recorded call that is replayed counts too.
    called: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))

    @property
    def calls(self) -> int:
        return int(self.called)

    def fits(self, x: Tensor, times: int = 1) -> bool:
        """Whether so many of x can be summed at once: the same on all ranks."""
        return x.dtype == torch.float32 and 0 < x.numel() * times <= self.slots.shape[2]

    def all_reduce(self, x: Tensor) -> None:
        """x, contiguous, becomes the ranks' sum."""
        ops.run(self._call(x))

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' x, [ranks, *x.shape]: the sum of rows that are zeros but for the rank's own. x is contiguous."""
        ranks = self.slots.shape[1]
        out = x.new_empty(ranks, *x.shape)
        copy = ops.op("shm_allreduce", "copy_f32"), (x, out, x.numel(), self.rank, ranks)
        ops.run(copy, self._call(out))
        return out

    def all_reduce_add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        """residual += the ranks' sum of x, then x = the norm of it. All contiguous, x and residual [T, H]."""
        rest = x, residual, weight, None, None, *x.shape, float(eps)  # no bias, and nothing to be added
        ops.run(self._call(x), (ops.op("norm", "add_rms_norm_f32"), rest))

    def _call(self, x: Tensor) -> tuple[ops.Op, tuple[ops.Value, ...]]:
        sizes = x.numel(), self.slots.shape[1], self.slots.shape[2], self.rank, LINE
        return ops.op("shm_allreduce", "all_reduce_f32"), (x, self.slots, self.counts, self.called, *sizes)
