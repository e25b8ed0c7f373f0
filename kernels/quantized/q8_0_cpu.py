"""Q8_0 on CPUs: q8_0_cpu.cpp. Few rows are multiplied with the codes as they lie; the weight is never in memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..cpp import ops

MOST_ROWS = 64
GROUP = 32  # weights with one scale
BLOCK = 16  # outputs that lie together, as in q8_0_cpu.cpp
DIGITS = 112  # bytes of a group of a row in digits


class Packed(NamedTuple):
    """A weight [O, I] in blocks of 16 outputs, the last one filled up with zeros."""

    # uint8 [O / 16, I / 32, 544]: of each group 16 f16 scales, then codes + 128 [8, 16, 4]: fours of inputs, outputs
    blocks: Tensor
    outputs: int

    @property
    def inputs(self) -> int:
        return self.blocks.shape[1] * GROUP


def takes(x: Tensor) -> bool:
    """Whether operations read x [O, I], weights or codes."""
    return x.device.type == "cpu" and x.is_contiguous() and x.numel() > 0 and ops.available()


def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [O, I] and scales [O, I / 32] of a weight in f32 or bf16."""
    codes = weight.new_empty(weight.shape, dtype=torch.int8)
    scales = weight.new_empty(len(weight), weight.shape[1] // GROUP, dtype=torch.float32)
    ops.typed("q8_0_cpu", "q8_0_encode", weight.dtype)(weight, codes, scales, scales.numel())
    return codes, scales.to(torch.float16)


def pack(codes: Tensor, scales: Tensor) -> Packed:
    outputs, groups = scales.shape
    count = -(-outputs // BLOCK)
    blocks = codes.new_empty(count, groups, BLOCK * (2 + GROUP), dtype=torch.uint8)
    more = (0, 0, 0, count * BLOCK - outputs)
    halves = pad(scales, more).view(count, BLOCK, groups).transpose(1, 2)
    blocks[:, :, : 2 * BLOCK].view(torch.float16).copy_(halves)
    fours = pad(codes, more).view(torch.uint8).view(count, BLOCK, groups, GROUP // 4, 4).permute(0, 2, 3, 1, 4)
    codes_of = blocks[:, :, 2 * BLOCK :]
    codes_of.unflatten(2, (GROUP // 4, BLOCK, 4)).copy_(fours)
    codes_of ^= 128
    return Packed(blocks, outputs)


def supports(x: Tensor) -> bool:
    """x [T, I]."""
    return 0 < len(x) <= MOST_ROWS and x.stride(1) == 1 and x.dtype in ops.SUFFIXES


def linear(x: Tensor, packed: Packed, bias: Tensor | None = None) -> Tensor:
    """[T, O], where it supports; sums are f32."""
    outputs, inputs = packed.outputs, packed.inputs
    y = x.new_empty(len(x), outputs)
    digits = x.new_empty(len(x), inputs // GROUP, DIGITS, dtype=torch.uint8)
    size = (len(x), inputs, x.stride(0))
    ops.run(
        (ops.typed("q8_0_cpu", "q8_0_split", x.dtype), (x, digits, *size)),
        (
            ops.typed("q8_0_cpu", "q8_0_linear", x.dtype),
            (x, digits, packed.blocks, bias, y, len(x), inputs, outputs, x.stride(0)),
        ),
    )
    return y


def experts(
    x: Tensor, stack: Packed, sizes: tuple[int, int], ends: Tensor, bias: Tensor | None, y: Tensor,
    at: Tensor | None = None, rows: slice = slice(None),
) -> ops.Calls:  # fmt: skip
    """Operations that make y [P, O] of x [P, I], whose rows are sorted by expert. stack: the weights [O, I] of all
    experts, each filled up to whole blocks. sizes: experts, O. ends int32 [experts + 1]: where each one's rows begin.
    bias [experts, O]. at int64 [experts]: which of the stack's weights is each one's, where it is not its own number.
    rows: of x, that are multiplied."""
    count, outputs = sizes
    digits = x.new_empty(len(x), stack.inputs // GROUP, DIGITS, dtype=torch.uint8)
    of = x, digits, stack.blocks, bias, ends, at, y, count, stack.inputs, outputs, x.stride(0)
    mine = x[rows]
    return (
        (ops.typed("q8_0_cpu", "q8_0_split", x.dtype), (mine, digits[rows], len(mine), stack.inputs, x.stride(0))),
        (ops.typed("q8_0_cpu", "q8_0_experts", x.dtype), of),
    )


def dequantize(packed: Packed, dtype: torch.dtype, first: int, last: int) -> Tensor:
    """Outputs first to last of the weight, [last - first, I]; first is a block's."""
    made = dtype if dtype in ops.SUFFIXES else torch.float32
    y = packed.blocks.new_empty(last - first, packed.inputs, dtype=made)
    ops.typed("q8_0_cpu", "q8_0_dequantize", made)(packed.blocks[first // BLOCK :], y, packed.inputs, last - first)
    return y.to(dtype)
