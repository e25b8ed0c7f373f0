"""Weights of quantised codes in blocks of 16 outputs on CPUs: kernels/cpp/blocks.h.

Few rows are multiplied with the codes as they lie; the weight is never in memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..activation.activation import gated_activation
from ..cpp import ops
from ..cpp.scratch import Scratch
from . import digits_cpu, target
from .digits_cpu import RUN

MOST_ROWS = 64
BLOCK = 16  # outputs that lie together, as in blocks.h
AHEAD = 4096  # bytes from what is read to what is asked for


class Blocks(NamedTuple):
    """A weight [O, I], the last block filled up with zeros, and what its operations have to know."""

    source: str  # their file
    name: str  # what their names begin with
    blocks: Tensor  # uint8 [ceil(O / 16), …]
    outputs: int
    inputs: int
    super: int  # inputs of a group
    zero: int  # what all codes have too much


class Gated(NamedTuple):
    """What rows x [P, I] of experts are made of: act(both's first half) * its second half."""

    act: str
    both: Tensor  # [P, 2 I], contiguous, as x is then


def takes(x: Tensor) -> bool:
    """Whether operations will read what is packed of x [O, I], weights or codes. `target` says on which device that
    is. x itself may still lie on a GPU: whether operations may read it now, `ops.takes` says."""
    return target.of(x) == "cpu" and x.is_contiguous() and x.numel() > 0 and ops.available()


def supports(x: Tensor) -> bool:
    """x [T, I]."""
    return 0 < len(x) <= MOST_ROWS and x.stride(1) == 1 and x.dtype in ops.SUFFIXES


def lie_together(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [O, I] of 4, 6 or 8 bits as blocks have them: [ceil(O / 16), I / 32, 64 * bits], zeros behind the
    last output."""
    inputs = codes.shape[1]
    if bits == 6:
        # output run half, first and second bit of a half's fours, input of four   ->   run, first bit, output, input
        upper = blocked(codes >> 4, inputs).view(-1, BLOCK, inputs // RUN, 2, 2, 2, 4)
        upper = upper[:, :, :, 0] | upper[:, :, :, 1] << 2
        upper = (upper[:, :, :, :, 0] | upper[:, :, :, :, 1] << 4).permute(0, 2, 3, 1, 4)
        return torch.cat((lie_together(codes & 15, 4), upper.reshape(len(upper), inputs // RUN, -1)), 2)
    parts = blocked(codes, inputs).view(-1, BLOCK, inputs // RUN, 2, 4, 4)  # halves of a run, fours
    if bits == 4:
        parts = (parts[:, :, :, 0] | parts[:, :, :, 1] << 4).unsqueeze(3)
    return parts.permute(0, 2, 3, 4, 1, 5).reshape(len(parts), inputs // RUN, -1)


def blocked(numbers: Tensor, width: int) -> Tensor:
    """[O, width] → [ceil(O / 16), 16, width], zeros behind the last output."""
    return pad(numbers, (0, 0, 0, -len(numbers) % BLOCK)).view(-1, BLOCK, width)


def linear(x: Tensor, of: Blocks, gate: str = "", bias: Tensor | None = None) -> Tensor:
    """[T, O], or gated [T, O / 2], where it supports; sums are f32."""
    y, digits = x.new_empty(len(x), of.outputs), digits_cpu.empty(x, Scratch(len(x)))
    sizes = (len(x), of.inputs, of.outputs, x.stride(0), of.super, of.zero, AHEAD)
    ops.run(
        digits_cpu.split(x, digits),
        (ops.typed(of.source, f"{of.name}_linear", x.dtype), (x, digits, of.blocks, bias, y, *sizes)),
    )
    return gated_activation(y, gate) if gate else y


def ahead(block: int, read: int) -> int:
    """Bytes from what is read to what is asked for, of blocks of which the first `read` bytes are read: where these are
    not all, the same place of another block, so that nothing is asked for that is not read."""
    return AHEAD if read == block else -(-AHEAD // read) * block


def experts(
    x: Tensor, of: Blocks, sizes: tuple[int, int, int], ends: Tensor, bias: Tensor | None, y: Tensor,
    scratch: Scratch, at: Tensor | None = None, gated: Gated | None = None,
) -> ops.Calls:  # fmt: skip
    """Operations that make y [P, O] of x [P, I], whose rows are sorted by expert. of: the weights [O, I] of all
    experts, each filled up to whole blocks. sizes: experts, O, and the outputs that their weights have, which may have
    more inputs, too: the first ones of both halves, and the first inputs, are multiplied, in multiples of 16 and of
    RUN. ends int32 [experts + 1]: where each one's rows begin. bias [experts, O]. at int64 [experts]: which of the
    stack's weights is each one's, where it is not its own number. gated: what x is made of first."""
    (count, outputs, whole), inputs, block = sizes, x.shape[1], of.blocks[0].nbytes
    digits = digits_cpu.empty(x, scratch)
    if gated is None:
        split = digits_cpu.split(x, digits, ends, count)
    else:
        split = digits_cpu.split_gated(*gated, x, digits, ends, count)
    of_blocks = ahead(block, block * inputs // of.inputs), -(-whole // BLOCK), block
    told = count, inputs, outputs, x.stride(0), of.super, of.zero, *of_blocks
    multiply = ops.typed(of.source, f"{of.name}_experts", x.dtype)
    return split, (multiply, (x, digits, of.blocks, bias, ends, at, scratch.taken, y, *told))


def dequantize(of: Blocks, dtype: torch.dtype, first: int, last: int) -> Tensor:
    """Outputs first to last of the weight, [last - first, I]; first is a block's."""
    made = dtype if dtype in ops.SUFFIXES else torch.float32
    y = of.blocks.new_empty(last - first, of.inputs, dtype=made)
    sizes = (of.inputs, last - first, of.super, of.zero)
    ops.typed(of.source, f"{of.name}_dequantize", made)(of.blocks[first // BLOCK :], y, *sizes)
    return y.to(dtype)
