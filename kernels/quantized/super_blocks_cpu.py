"""Super-blocks on CPUs: super_blocks_cpu.cpp. Few rows are multiplied with the codes as they lie."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..activation.activation import gated_activation
from ..cpp import ops
from .super_blocks_form import Form

SOURCE = "super_blocks_cpu"
MOST_ROWS = 64
BLOCK = 16  # outputs that lie together, as in super_blocks_cpu.cpp
RUN = 32  # inputs that lie together
DIGITS = 132  # bytes of a run of a row in digits
FACTORS = 4 * BLOCK  # bytes of a super-block


class Packed(NamedTuple):
    """A weight [O, I] in blocks of 16 outputs, the last one filled up with zeros."""

    blocks: Tensor  # uint8 [ceil(O / 16), I / super, bytes]
    outputs: int
    form: Form

    @property
    def inputs(self) -> int:
        return self.blocks.shape[1] * self.form.super


def available() -> bool:
    return ops.available()


def takes(blocks: Tensor) -> bool:
    return blocks.device.type == "cpu" and blocks.numel() > 0 and ops.available()


def super_bytes(form: Form) -> int:
    """Of sixteen outputs."""
    return FACTORS + form.super // RUN * _run_bytes(form)


def _run_bytes(form: Form) -> int:
    return RUN // form.group * 2 * BLOCK + BLOCK * RUN * form.bits // 8


def pack(codes: Tensor, factors: Tensor, scales: Tensor, minima: Tensor, form: Form) -> Tensor:
    """Blocks of what a `Decoded` has."""
    outputs, inputs = codes.shape
    count, supers, runs = -(-outputs // BLOCK), inputs // form.super, form.super // RUN
    more = (0, 0, 0, count * BLOCK - outputs)
    blocks = codes.new_empty(count, supers, super_bytes(form))
    # block output super-block, scales or minima   ->   block super-block, scales or minima, output
    halves = pad(factors.flatten(1), more).view(count, BLOCK, supers, 2).permute(0, 2, 3, 1)
    blocks[..., :FACTORS] = halves.reshape(count, supers, -1).view(torch.uint8)
    of_runs = blocks[..., FACTORS:].view(count, supers, runs, -1)
    numbers = pad(torch.stack((scales, minima), 2).flatten(1), more).view(count, BLOCK, supers, runs, -1, 2)
    ends = RUN // form.group * 2 * BLOCK
    of_runs[..., :ends] = numbers.permute(0, 2, 3, 4, 5, 1).reshape(count, supers, runs, -1).view(torch.uint8)
    parts = pad(codes, more).view(count, BLOCK, supers, runs, 2, 4, 4)  # halves of a run, fours
    if form.bits == 4:
        parts = (parts[..., 0, :, :] | parts[..., 1, :, :] << 4).unsqueeze(4)
    of_runs[..., ends:] = parts.permute(0, 2, 3, 4, 5, 1, 6).reshape(count, supers, runs, -1)
    return blocks


def supports(x: Tensor) -> bool:
    """x [T, I]."""
    return 0 < len(x) <= MOST_ROWS and x.stride(1) == 1 and x.dtype in ops.SUFFIXES


def linear(x: Tensor, packed: Packed, gate: str = "", bias: Tensor | None = None) -> Tensor:
    """[T, O], or gated [T, O / 2], where it supports; sums are f32."""
    outputs, inputs, form = packed.outputs, packed.inputs, packed.form
    y = x.new_empty(len(x), outputs)
    digits = x.new_empty(len(x), inputs // RUN, DIGITS, dtype=torch.uint8)
    size = (len(x), inputs, x.stride(0))
    of_weight = (len(x), inputs, outputs, x.stride(0), form.super, form.zero)
    ops.run(
        (ops.typed(SOURCE, "super_blocks_split", x.dtype), (x, digits, *size)),
        (ops.typed(SOURCE, _name("linear", form), x.dtype), (x, digits, packed.blocks, bias, y, *of_weight)),
    )
    return gated_activation(y, gate) if gate else y


def experts(
    x: Tensor, stack: Packed, sizes: tuple[int, int], ends: Tensor, bias: Tensor | None, y: Tensor,
    at: Tensor | None = None, rows: slice = slice(None),
) -> ops.Calls:  # fmt: skip
    """Operations that make y [P, O] of x [P, I], whose rows are sorted by expert, as `q8_0_cpu.experts` does."""
    (count, outputs), inputs, form = sizes, stack.inputs, stack.form
    digits = x.new_empty(len(x), inputs // RUN, DIGITS, dtype=torch.uint8)
    of = x, digits, stack.blocks, bias, ends, at, y, count, inputs, outputs, x.stride(0), form.super, form.zero
    return (
        (ops.typed(SOURCE, "super_blocks_split", x.dtype), (x[rows], digits[rows], len(x[rows]), inputs, x.stride(0))),
        (ops.typed(SOURCE, _name("experts", form), x.dtype), of),
    )


def dequantize(packed: Packed, dtype: torch.dtype, first: int, last: int) -> Tensor:
    """Outputs first to last of the weight, [last - first, I]; first is a block's."""
    made, form = dtype if dtype in ops.SUFFIXES else torch.float32, packed.form
    y = packed.blocks.new_empty(last - first, packed.inputs, dtype=made)
    size = (packed.inputs, last - first, form.super, form.zero)
    ops.typed(SOURCE, _name("dequantize", form), made)(packed.blocks[first // BLOCK :], y, *size)
    return y.to(dtype)


def _name(what: str, form: Form) -> str:
    return f"super_blocks_{what}_{form.bits}_{RUN // form.group}"
