"""Experts on CPUs: all that a batch of tokens chooses in one call of C++, without Python for each expert.

The steps: host_experts.cpp sorts routed tokens by expert and brings their tokens' rows together;
the format's own operation multiplies each expert's rows with its weight as it lies; then the activation, the second
linear, and the sum over each token's experts. Weights may be plain, or quantised; the two linears may differ in format.
The weights may lie in any memory: only the experts that are chosen are read.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..activation.activation import activate_call, gated_call
from ..cpp import ops
from ..cpp.scratch import Scratch
from ..quantized import blocks_cpu, cpu_layouts, e4m3_cpu, int8_planes_cpu
from ..quantized.blocks_cpu import Gated
from ..quantized.stack import Stack

if TYPE_CHECKING:
    from .moe import Inputs, Matrices

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
        most = int8_planes_cpu.max_rows(x.dtype)
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


def _experts(given: Inputs) -> Tensor:
    x, ids, weights, w13, w2, act, biases, local_experts, gated = given
    (tokens, hidden), top, routed = x.shape, ids.shape[1], ids.numel()
    count, both, _ = w13.shape
    routed_id, place, offsets = (torch.empty(n, dtype=torch.int32) for n in (routed, routed, count + 1))
    rows, up, inner = x.new_empty(routed, hidden), x.new_empty(routed, both), x.new_empty(routed, w2.shape[2])
    down, y = x.new_empty(routed, hidden), x.new_empty(tokens, hidden)
    first, scratch, size = local_experts.first if local_experts else 0, Scratch(tokens), x.element_size()
    combine = "combine_routed_f32" if x.dtype == torch.float32 else "combine_routed_to_bf16"
    ops.run(
        (ops.op(SOURCE, "assign_rows"), (ids, _every(count), place, routed_id, offsets, routed, count, first, 1)),
        (ops.op(SOURCE, "gather_rows"), (x, rows, routed_id, offsets, count, top, hidden * size, x.stride(0) * size)),
        *linear(rows, w13, (count, both), offsets, biases.up, up, scratch),
        *(
            gated_linear(Gated(act, up), inner, w2, (count, hidden), offsets, biases.down, down, scratch)
            if gated
            else (activate_call(act, up), *linear(up, w2, (count, hidden), offsets, biases.down, down, scratch))
        ),
        (ops.op(SOURCE, combine), (down, weights, place, y, tokens, top, hidden)),
    )
    return y


def linear(
    x: Tensor, stack: Matrices, sizes: tuple[int, int], offsets: Tensor, bias: Tensor | None, y: Tensor,
    scratch: Scratch, at: Tensor | None = None,
) -> ops.Calls:  # fmt: skip
    """Operations that make y [P, O] of x [P, I], as `blocks_cpu.experts` has it."""
    if isinstance(stack, Tensor):
        every = _every(sizes[0]) if at is None else at
        return plain_linear(x, stack, every, offsets, bias, y, scratch)
    assert isinstance(stack, Stack), "`supports` was not asked"
    if isinstance(stack.packed, e4m3_cpu.Packed):
        return e4m3_cpu.experts(x, stack.packed, sizes, offsets, bias, y, scratch, at)
    return blocks_cpu.experts(x, stack.packed, sizes, offsets, bias, y, scratch, at)


def gated_linear(
    gated: Gated, x: Tensor, stack: Matrices, sizes: tuple[int, int], offsets: Tensor, bias: Tensor | None, y: Tensor,
    scratch: Scratch, at: Tensor | None = None, rows: slice = slice(None),
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
