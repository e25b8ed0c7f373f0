"""Experts that are computed on CPUs, wherever in host memory the weights of each lie: host_experts.cpp.

Each token's sum is made in the order of its experts from what each has made of it. So it does not depend on where
their weights are, to the last bit. Weights may be plain, or quantised: these are multiplied as they lie, by the
operations of their format. Where the model's dtype is f16, its rows become f32 on the way. What has neither operations
nor a compiler goes expert by expert, by torch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..cpp import ops
from ..cpp.scratch import Scratch
from ..gemm import linear as dense
from ..quantized.blocks_cpu import Gated
from .experts_cpu import gated_linear, linear, multiplies
from .moe import UNBIASED, Biases, Matrices, matrix

SOURCE = "host_experts"


class Experts(NamedTuple):
    """Weights of n experts in one memory."""

    w13: Matrices  # [n, 2 I, H], gate over up
    w2: Matrices  # [n, H, I]

    @property
    def size(self) -> int:
        return self.w13.shape[0]


class Round(NamedTuple):
    """Operations that compute the routed tokens of some experts."""

    calls: ops.Calls
    before: int  # how many come before the first one that reads weights: they prepare rows


class HostRouted:
    """The routed tokens of a step on the host: T tokens and their k experts each, of which some are computed here."""

    def __init__(self, x: Tensor, ids: Tensor, weights: Tensor, act: str, biases: Biases = UNBIASED, first: int = 0):
        """x [T, H], ids [T, k] int32, weights [T, k] f32, contiguous. biases: of this rank's experts, as `host_biases`
        has them. first: the router's number of the first of these."""
        self.x, self.ids, self.weights, self.act, self.biases, self.first = x, ids, weights, act, biases, first
        self._used = 0
        self._place = torch.full((ids.numel(),), -1, dtype=torch.int32)
        self._made = torch.empty(0)
        self._buffers: tuple[Tensor, ...] = ()
        self._scratch = Scratch(len(x))

    def add(self, stack: Experts, at: Tensor, count: int) -> None:
        """Compute the routed tokens of some experts, once each. at: [E] int64 each expert's index in `stack`; -1: it is
        not among these. count: how many routed tokens they have."""
        if not count:
            return
        if computes(self.x, stack):
            ops.run(*self._round(stack, at, slice(self._used, self._used + count)).calls)
        else:
            self._add_plainly(stack, at)
        self._used += count

    def all_calls(self, stack: Experts, at: Tensor, out: Tensor) -> Round:
        """Operations that fill out [T, H] f32 with the weighted sums of all routed tokens whose experts have a weight
        by `at`, which is read when they run: they may run again when what lies in these tensors has changed. The last
        one alone adds up."""
        self._used = 0
        calls, before = self._round(stack, at, slice(0, self.ids.numel()))
        return Round((*calls, self._combine(out)), before)

    def _round(self, stack: Experts, at: Tensor, mine: slice) -> Round:
        """Operations of one pass over the routed rows. Rows without a local expert are left undefined."""
        experts, routed, k, (outputs, hidden) = len(at), self.ids.numel(), self.ids.shape[1], stack.w13.shape[1:]
        if not self._buffers:
            starts, routed_id = (torch.empty(n, dtype=torch.int32) for n in (experts + 1, routed))
            widths, dtype = (hidden, outputs, outputs // 2), computed_in(self.x.dtype)
            self._buffers = starts, routed_id, *(self.x.new_empty(routed, width, dtype=dtype) for width in widths)
            wide = isinstance(stack.w2, Tensor)
            self._made = torch.empty(routed, hidden, dtype=torch.float32 if wide else dtype)
        starts, routed_id, rows, both, inner = self._buffers
        halves = self.x.dtype == torch.float16
        gather, row = ("gather_halves", hidden) if halves else ("gather_rows", hidden * self.x.element_size())
        places = self._place, routed_id, starts, routed, experts, self.first, int(not self._used)
        placed = (
            (ops.op(SOURCE, "assign_rows"), (self.ids, at, *places)),
            (ops.op(SOURCE, gather), (self.x, rows, routed_id, starts, experts, k, row, row)),
        )
        up = linear(rows, stack.w13, (experts, outputs), starts, self.biases.up, both, self._scratch, at)
        of_inner = Gated(self.act, both), inner, stack.w2, (experts, hidden), starts, self.biases.down, self._made
        down = gated_linear(*of_inner, self._scratch, at, mine)
        return Round((*placed, *up, *down), len(placed) + len(up) - 1)

    def _add_plainly(self, stack: Experts, at: Tensor) -> None:
        """Computes by torch: for dtypes and formats that C++ has no operations for, and where it does not compile."""
        local, used, k = self.ids.flatten().long() - self.first, self._used, self.ids.shape[1]
        if not self._made.numel():
            self._made = torch.empty(self.ids.numel(), self.x.shape[1])
        for e in (at >= 0).nonzero().flatten().tolist():
            routed, index = (local == e).nonzero()[:, 0], int(at[e])
            x, w13, w2 = self.x[routed // k], *(matrix(one, index, self.x.dtype) for one in stack)
            up, down = (None if one is None else one[e].to(x.dtype) for one in self.biases)
            self._made[used : used + len(routed)] = dense.linear(dense.gated_linear(x, w13, self.act, up), w2, down)
            self._place[routed] = torch.arange(used, used + len(routed), dtype=torch.int32)
            used += len(routed)

    def sum(self, out: Tensor | None = None) -> Tensor:
        """The weighted sums of what was added, [T, H] f32; in `out`, where that is given."""
        (tokens, hidden), k = self.x.shape, self.ids.shape[1]
        y = torch.empty(tokens, hidden) if out is None else out
        if self._used and self._buffers:
            ops.run(self._combine(y))
            return y
        y.zero_()
        for j in range(k if self._used else 0):
            place = self._place.view(tokens, k)[:, j].long()
            there = place >= 0
            y[there] += self.weights[there, j, None] * self._made[place[there]]
        return y

    def _combine(self, y: Tensor) -> tuple[ops.Op, tuple[ops.Value, ...]]:
        (tokens, hidden), k = self.x.shape, self.ids.shape[1]
        one = ops.typed(SOURCE, "combine_routed", self._made.dtype)
        return one, (self._made, self.weights, self._place, y, tokens, k, hidden)


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which operations for x of a dtype compute."""
    return torch.float32 if dtype == torch.float16 else dtype


def host_biases(biases: Biases) -> Biases:
    """Biases of the model's dtype, on any device, as the operations read them."""
    return Biases(*(None if one is None else one.cpu().to(computed_in(one.dtype)) for one in biases))


def computes(x: Tensor, stack: Experts) -> bool:
    """Whether C++ has operations for all of this."""
    there = all(isinstance(one, Tensor) or multiplies(one) for one in stack)
    return there and ops.takes(x.new_empty(0, dtype=computed_in(x.dtype)))
