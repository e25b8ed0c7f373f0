"""Experts that are computed on CPUs, wherever in host memory the weights of each lie: host_experts.cpp.

Each token's sum is made in the order of its experts from what each has made of it. So it does not depend on where
their weights are, to the last bit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..cpp import ops
from ..gemm.linear import gated_linear, linear
from .moe import UNBIASED, Biases, of_expert


class Stack(NamedTuple):
    """Weights of some experts, of one dtype, contiguous."""

    w13: Tensor  # [n, 2 I, H], gate over up
    w2: Tensor  # [n, H, I]


class HostPairs:
    """The pairs of a step on the host: T tokens and their k experts each, of which some are computed here."""

    def __init__(self, x: Tensor, ids: Tensor, weights: Tensor, act: str, biases: Biases = UNBIASED, first: int = 0):
        """x [T, H], ids [T, k] int32, weights [T, k] f32, contiguous. biases: of this rank's experts. first: the
        router's number of the first of these."""
        self.x, self.ids, self.weights, self.act, self.biases, self.first = x, ids, weights, act, biases, first
        self._used = 0
        self._place = torch.full((ids.numel(),), -1, dtype=torch.int32)
        self._made = torch.empty(ids.numel(), x.shape[1], dtype=torch.float32)
        self._compiled = ops.takes(x)
        self._starts: Tensor | None = None

    def add(self, stack: Stack, at: np.ndarray, count: int) -> None:
        """Compute the pairs of some experts, once each. at: [E] int64 each expert's index in `stack`; -1: it is not
        among these. count: how many pairs they have."""
        if not count:
            return
        if self._compiled:
            self._add_compiled(stack, at, count)
        else:
            self._add_plainly(stack, at)
        self._used += count

    def _add_compiled(self, stack: Stack, at: np.ndarray, count: int) -> None:
        experts, pairs, k, (outputs, hidden) = len(at), self.ids.numel(), self.ids.shape[1], stack.w13.shape[1:]
        if self._starts is None:
            self._starts = torch.zeros(experts + 1, dtype=torch.int32)
            self._pair = torch.empty(pairs, dtype=torch.int32)
            self._rows = self.x.new_empty(pairs, hidden)
            self._both = self.x.new_empty(pairs, outputs)
            self._inner = self.x.new_empty(pairs, outputs // 2)
        up, down = (_addresses(one, at) for one in stack)
        starts, kind = self._starts, ops.SUFFIXES[self.x.dtype]
        names = ("place_pairs", "gather_rows", f"experts_up_{kind}", f"experts_down_{kind}")
        op = [ops.op("host_experts", name) for name in names]
        act = ops.op("activation", f"gated_{self.act}_{kind}")
        mine = slice(self._used, self._used + count)
        ops.run(
            (op[0], (self.ids, up, self._place, self._pair, starts, pairs, experts, self.first)),
            (op[1], (self.x, self._rows, self._pair, starts, experts, k, hidden * self.x.element_size())),
            (op[2], (self._rows, self._both, up, self.biases.up, starts, experts, hidden, outputs)),
            (act, (self._both[mine], self._inner[mine], count, outputs // 2)),
            (op[3], (self._inner, self._made, down, self.biases.down, starts, experts, outputs // 2, hidden)),
        )

    def _add_plainly(self, stack: Stack, at: np.ndarray) -> None:
        """By torch: of dtypes that C++ has no operations for, and where it does not compile."""
        local, used, k = self.ids.flatten().long() - self.first, self._used, self.ids.shape[1]
        for e in np.flatnonzero(at >= 0).tolist():
            pairs = (local == e).nonzero()[:, 0]
            x, w13, w2 = self.x[pairs // k], stack.w13[at[e]], stack.w2[at[e]]
            inner = gated_linear(x, w13, self.act, of_expert(self.biases.up, e))
            self._made[used : used + len(pairs)] = linear(inner, w2, of_expert(self.biases.down, e))
            self._place[pairs] = torch.arange(used, used + len(pairs), dtype=torch.int32)
            used += len(pairs)

    def sum(self, out: Tensor | None = None) -> Tensor:
        """The weighted sums of what was added, [T, H] f32; in `out`, where that is given."""
        (tokens, hidden), k = self.x.shape, self.ids.shape[1]
        y = torch.empty(tokens, hidden) if out is None else out
        if self._compiled:
            ops.op("host_experts", "combine_pairs")(self._made, self.weights, self._place, y, tokens, k, hidden)
            return y
        y.zero_()
        for j in range(k):
            place = self._place.view(tokens, k)[:, j].long()
            there = place >= 0
            y[there] += self.weights[there, j, None] * self._made[place[there]]
        return y


def _addresses(stack: Tensor, at: np.ndarray) -> Tensor:
    """[E] int64: of each expert's matrix; 0 where it has none here."""
    found = np.where(at >= 0, stack.data_ptr() + at * stack.stride(0) * stack.element_size(), 0)
    return torch.from_numpy(found)
