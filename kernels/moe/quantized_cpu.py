"""Quantised experts on CPUs: all that a batch of tokens chooses in one call of C++, without Python for each expert.

The steps: experts_cpu.cpp sorts pairs of tokens and experts by expert and brings their tokens' rows together; the
format's own operation multiplies each expert's rows with its weight as it lies; then the activation, the second linear,
and the sum over each token's experts. The two linears may differ in format. What memory the weights lie in is nobody's
business here: only the experts that are chosen are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..cpp import ops
from ..quantized import blocks_cpu, e4m3_cpu
from ..quantized.stack import Stack

if TYPE_CHECKING:
    from .moe import Biases, Held

SOURCE = "experts_cpu"
MOST_ROWS = 64  # pairs per expert, on average; of more, dequantising an expert first is faster


def supports(x: Tensor, ids: Tensor, w13: object, w2: object) -> bool:
    """Whether `experts` takes these, and is faster than dequantising experts one by one."""
    return multiplies(w13) and multiplies(w2) and _few(x, ids, w13)


def _few(x: Tensor, ids: Tensor, w13: object) -> bool:
    assert isinstance(w13, Stack)
    there = x.dtype in ops.SUFFIXES and x.stride(1) == 1 and x.numel() > 0
    return there and ids.numel() <= MOST_ROWS * w13.shape[0]


def multiplies(stack: object) -> bool:
    """Whether there are operations for its packed form: in blocks, or of e4m3."""
    packed = stack.packed if isinstance(stack, Stack) else None
    return hasattr(packed, "of_blocks") or isinstance(packed, e4m3_cpu.Packed)


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Stack, w2: Stack, act: str, biases: Biases, held: Held | None
) -> Tensor:
    """`moe.fused_experts` where it supports. Sums are f32; what the linears make is rounded to x's dtype."""
    (tokens, hidden), top, pairs = x.shape, ids.shape[1], ids.numel()
    count, both, _ = w13.shape
    order, place, ends = (torch.empty(n, dtype=torch.int32) for n in (pairs, pairs, count + 1))
    rows, up, inner = x.new_empty(pairs, hidden), x.new_empty(pairs, both), x.new_empty(pairs, both // 2)
    down, y = x.new_empty(pairs, hidden), x.new_empty(tokens, hidden)
    first = held.first if held else 0
    ops.run(
        (ops.op(SOURCE, "experts_sort"), (ids, order, place, ends, pairs, count, first)),
        (ops.typed(SOURCE, "experts_gather", x.dtype), (x, order, rows, pairs, top, hidden, x.stride(0))),
        *linear(rows, w13, w13.shape[:2], ends, biases.up, up),
        (ops.typed("activation", f"gated_{act}", x.dtype), (up, inner, pairs, both // 2)),
        *linear(inner, w2, w2.shape[:2], ends, biases.down, down),
        (ops.typed(SOURCE, "experts_combine", x.dtype), (down, place, weights, y, tokens, top, hidden)),
    )
    return y


def linear(
    x: Tensor, stack: Stack, sizes: tuple[int, int], ends: Tensor, bias: Tensor | None, y: Tensor,
    at: Tensor | None = None, rows: slice = slice(None),
) -> ops.Calls:  # fmt: skip
    """Operations that make y [P, O] of x [P, I], as `blocks_cpu.experts` has it."""
    if isinstance(stack.packed, e4m3_cpu.Packed):
        return e4m3_cpu.experts(x, stack.packed, sizes, ends, bias, y, at, rows)
    return blocks_cpu.experts(x, stack.packed.of_blocks, sizes, ends, bias, y, at, rows)
