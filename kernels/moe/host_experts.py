"""Experts that C++ computes on CPUs, wherever in host memory the weights of each lie: host_experts.cpp.

Routed tokens are sorted by expert, and their tokens' rows brought together; the format's own operation multiplies each
expert's rows with its weight as it lies; then come the activation, the second linear, and each token's sum, in the
order of its experts. So a sum does not depend on where the weights are, to the last bit. Weights may be plain, or
quantised; the two linears may differ in format. Where the model's dtype is f16, its rows become f32 on the way. Only
the experts that are chosen are read.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..activation.activation import activate_call, gated_call
from ..cpp import ops
from ..cpp.scratch import Scratch
from ..quantized import blocks_cpu, cpu_layouts, e4m3_cpu
from ..quantized.blocks_cpu import Gated
from ..quantized.stack import Stack

if TYPE_CHECKING:
    from .moe import Biases, Inputs, Matrices

SOURCE = "host_experts"
MAX_ROWS = 64  # routed tokens per expert at once, on average, whose rows are in memory
MAX_TOKENS = 64  # of plain weights; of more, torch's GEMMs are faster


def supports(x: Tensor, ids: Tensor, w13: Matrices, w2: Matrices) -> bool:
    """Whether `experts` takes these, and is faster than experts one by one."""
    there = all(multiplies(one) or _is_plain(one, x) for one in (w13, w2))
    if not there or x.stride(1) != 1 or not x.numel() or not ops.takes(x):
        return False
    plain = any(isinstance(one, Tensor) and one.dtype == x.dtype for one in (w13, w2))
    most = MAX_ROWS  # of more, dequantising an expert first is faster
    if all(isinstance(one, Stack) and isinstance(one.packed, cpu_layouts.Packed) for one in (w13, w2)):
        most = blocks_cpu.max_rows(x.dtype)
    return ids.numel() <= most * w13.shape[0] and not (plain and len(x) > MAX_TOKENS)


def _is_plain(stack: Matrices, x: Tensor) -> bool:
    """Whether weights have x's dtype, or 16 bits under f32."""
    if not isinstance(stack, Tensor) or not stack.is_contiguous():
        return False
    return stack.dtype == x.dtype or (x.dtype == torch.float32 and stack.element_size() == 2)


def multiplies(stack: object) -> bool:
    """Whether there are operations for its packed form: in blocks, or of e4m3."""
    packed = stack.packed if isinstance(stack, Stack) else None
    return isinstance(packed, cpu_layouts.Packed | e4m3_cpu.Packed)


def experts(given: Inputs) -> Tensor:
    """`moe.fused_experts` where it supports. Sums are f32; what the linears make is rounded to x's dtype."""
    tokens = max(1, MAX_ROWS * given.w13.shape[0] // given.ids.shape[1])
    if len(given.x) <= tokens:
        return _experts(given)
    parts = zip(given.x.split(tokens), given.ids.split(tokens), given.weights.split(tokens), strict=True)
    return torch.cat([_experts(given._replace(x=x, ids=ids, weights=weights)) for x, ids, weights in parts])


class Experts(NamedTuple):
    """Weights of n experts in one memory."""

    w13: Matrices  # [n, 2 I, H], gate over up
    w2: Matrices  # [n, H, I]

    @property
    def size(self) -> int:
        return self.w13.shape[0]


def _experts(given: Inputs) -> Tensor:
    x, ids, weights, w13, w2, act, biases, local_experts, gated = given
    first, y = local_experts.first if local_experts else 0, x.new_empty(x.shape)
    routed = HostRouted(x, ids, weights, act, biases, first, gated)
    ops.run(*routed.all_calls(Experts(w13, w2), _every(w13.shape[0]), y).calls)
    return y


@dataclass
class Round:
    """Operations that compute the routed tokens of some experts."""

    calls: ops.Calls
    before: int  # how many come before the first one that reads weights: they prepare rows

    @functools.cached_property
    def packed(self) -> ctypes.Array[Any]:
        """The calls as C++ takes them, to run again and again."""
        return ops.call_array([(op.address, ops.pack(values)) for op, values in self.calls])

    def run(self, threads: int) -> None:
        ops.run_calls(self.packed, len(self.calls), threads)


class HostRouted:
    """The routed tokens of a step on the host: T tokens and their k experts each, of which some are computed here."""

    def __init__(
        self, x: Tensor, ids: Tensor, weights: Tensor, act: str, biases: Biases | tuple[None, None] = (None, None),
        first: int = 0, gated: bool = True,
    ):  # fmt: skip
        """x [T, H], ids [T, k] int32, weights [T, k] f32; but for x's rows contiguous. biases: of this rank's experts,
        of the dtype of `computed_in`. first: the router's number of the first of these."""
        self.x, self.ids, self.weights, self.act, self.biases, self.first = x, ids, weights, act, biases, first
        self.gated, self._used = gated, 0
        self._place = torch.empty(ids.numel(), dtype=torch.int32)
        self._buffers: tuple[Tensor, ...] = ()
        self._scratch = Scratch(len(x))

    def add(self, stack: Experts, at: Tensor, count: int) -> None:
        """Compute the routed tokens of some experts, once each. at: [E] int64 each expert's index in `stack`; -1: it is
        not among these. count: how many routed tokens they have."""
        if count:
            ops.run(*self._round(stack, at, slice(self._used, self._used + count), torch.float32).calls)
            self._used += count

    def all_calls(self, stack: Experts, at: Tensor, out: Tensor) -> Round:
        """Operations that fill out [T, H], of x's dtype or f32, with the weighted sums of all routed tokens whose
        experts have a weight by `at`, which is read when they run: they may run again when what lies in these tensors
        has changed. The last one alone adds up."""
        self._used = 0
        one = self._round(stack, at, slice(0, self.ids.numel()), out.dtype)
        return Round((*one.calls, self._combine(out)), one.before)

    def _round(self, stack: Experts, at: Tensor, mine: slice, summed: torch.dtype) -> Round:
        """Operations of one pass over the routed rows. Rows without a local expert are left undefined. summed: the
        dtype of the sums; what plain weights make has it, too."""
        experts, routed, k, (outputs, hidden) = len(at), self.ids.numel(), self.ids.shape[1], stack.w13.shape[1:]
        if not self._buffers:
            dtype, wide = computed_in(self.x.dtype), isinstance(stack.w2, Tensor) and summed == torch.float32
            widths = hidden, outputs, *((outputs // 2,) if self.gated else ())
            self._made = self.x.new_empty(routed, hidden, dtype=summed if wide else dtype)
            starts, routed_id = (torch.empty(n, dtype=torch.int32) for n in (experts + 1, routed))
            self._buffers = starts, routed_id, *(self.x.new_empty(routed, width, dtype=dtype) for width in widths)
        (starts, routed_id, rows, both, *inner), size = self._buffers, self.x.element_size()
        gather, of = ("gather_halves", 1) if self.x.dtype == torch.float16 else ("gather_rows", size)
        placed = (
            (ops.op(SOURCE, "assign_rows"),
             (self.ids, at, self._place, routed_id, starts, routed, experts, self.first, int(not self._used))),
            (ops.op(SOURCE, gather), (self.x, rows, routed_id, starts, experts, k, hidden * of, self.x.stride(0) * of)),
        )  # fmt: skip
        of_up, of_down = self.biases
        up = linear(rows, stack.w13, (experts, outputs), starts, of_up, both, self._scratch, at)
        rest = stack.w2, (experts, hidden), starts, of_down, self._made, self._scratch, at
        if self.gated:
            down = gated_linear(Gated(self.act, both), inner[0], *rest, mine)
        else:
            down = activate_call(self.act, both), *linear(both, *rest)
        return Round((*placed, *up, *down), len(placed) + len(up) - 1)

    def sum(self, out: Tensor | None = None) -> Tensor:
        """The weighted sums of what was added, [T, H] f32; in `out`, where that is given."""
        y = torch.empty(self.x.shape) if out is None else out
        if not self._used:
            return y.zero_()
        ops.run(self._combine(y))
        return y

    def _combine(self, y: Tensor) -> tuple[ops.Op, tuple[ops.Value, ...]]:
        of = ops.typed(SOURCE, "combine_routed" if y.dtype == torch.float32 else "combine_routed_to", self._made.dtype)
        return of, (self._made, self.weights, self._place, y, len(y), self.ids.shape[1], y.shape[1])


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which operations for x of a dtype compute."""
    return torch.float32 if dtype == torch.float16 else dtype


def linear(
    x: Tensor, stack: Matrices, sizes: tuple[int, int], offsets: Tensor, bias: Tensor | None, y: Tensor,
    scratch: Scratch, at: Tensor,
) -> ops.Calls:  # fmt: skip
    """Operations that make y [P, O] of x [P, I], as `blocks_cpu.experts` has it."""
    if isinstance(stack, Tensor):
        return plain_linear(x, stack, at, offsets, bias, y, scratch)
    assert isinstance(stack, Stack), "`supports` was not asked"
    if isinstance(stack.packed, e4m3_cpu.Packed):
        return e4m3_cpu.experts(x, stack.packed, sizes, offsets, bias, y, scratch, at)
    return blocks_cpu.experts(x, stack.packed, sizes, offsets, bias, y, scratch, at)


def gated_linear(
    gated: Gated, x: Tensor, stack: Matrices, sizes: tuple[int, int], offsets: Tensor, bias: Tensor | None, y: Tensor,
    scratch: Scratch, at: Tensor, rows: slice,
) -> ops.Calls:  # fmt: skip
    """A linear of what is `gated`, which makes x first: with one operation less where x becomes int8 planes. rows:
    those that may be of any expert."""
    if isinstance(stack, Stack) and not isinstance(stack.packed, e4m3_cpu.Packed):
        return blocks_cpu.experts(x, stack.packed, sizes, offsets, bias, y, scratch, at, gated)
    both, inner = gated.both[rows], x[rows]
    return gated_call(gated.act, both, inner), *linear(x, stack, sizes, offsets, bias, y, scratch, at)


class _Tiled(NamedTuple):
    rows: int  # of a tile of AMX
    least: int  # an expert's, from which on tiles take it


@functools.cache
def _tiled(library: ctypes.CDLL) -> _Tiled | None:
    """The tiles of host_experts.cpp, if it is compiled with any."""
    if not hasattr(library, "pair_rows"):
        return None
    return _Tiled(*(ctypes.c_int64.in_dll(library, name).value for name in ("tile_rows", "paired_rows")))


def plain_linear(
    x: Tensor, stack: Tensor, at: Tensor, starts: Tensor, bias: Tensor | None, y: Tensor, scratch: Scratch
) -> ops.Calls:
    """Operations of host_experts.cpp that make y [routed, O], of x's dtype or f32, of x [routed, I], by each place's
    expert: at [places] is its index in stack [E, O, I], of x's dtype or of 16 bits under f32, and starts [places + 1]
    where its rows begin."""
    _, outputs, inputs = stack.shape
    calls: ops.Calls = ()
    paired = None
    tiled = _tiled(ops.libraries()[SOURCE])
    if tiled and x.dtype == torch.bfloat16 and scratch.tokens >= tiled.least:  # else no expert has rows for tiles
        paired = scratch.empty(x, (len(x) // tiled.rows + len(at) + 1, tiled.rows * inputs), x.dtype)
        calls = ((ops.op(SOURCE, "pair_rows"), (x, paired, starts, len(at), inputs)),)
    of = x, paired, y, stack, at, bias, starts, len(at), inputs, outputs
    name = "experts_up" if x.dtype == y.dtype else "experts_down"
    name = name if x.dtype == stack.dtype else "experts_f32_of"
    return *calls, (ops.typed(SOURCE, name, stack.dtype), of)


@functools.cache
def _every(count: int) -> Tensor:
    """The numbers of all experts. By numpy, as what torch computes cannot be recorded."""
    return torch.from_numpy(np.arange(count))
