"""MXFP4 of experts, in the form that their device reads. It is a codec of stacks (stack.py)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from ..cpp import ops
from . import blocks_cpu, dequantize_pieces, floats, mxfp4_cpu, mxfp4_cuda, pieces_cuda
from .floats import Floats
from .stack import Codec, Stack, padded, stack

BITS = 4.25  # of a weight with its share of its group's scale
AT_ONCE = 1 << 22  # bytes of codes that are packed at once: what that takes is small beside a stack

Packed = mxfp4_cpu.Packed | pieces_cuda.Packed


def experts(
    codes: Tensor,
    scales: Tensor,
    other_inputs: int,
    dtype: torch.dtype,
    in_order: Callable[[Tensor], Tensor] = Tensor.contiguous,
) -> Floats | Stack:
    """Weights [E, O, I], packed where kernels of their device multiply dtype by them so.

    codes uint8 [E, O, I / 2] and scales uint8 [E, O, I / 32], whose outputs `in_order` brings into the right order.
    other_inputs: of these experts' other matrix. Where one cannot be in pieces, neither is: kernels take both or none.
    """
    count, outputs, row_bytes = codes.shape
    inputs = 2 * row_bytes
    if codes.is_cuda:
        taken = codes.numel() > 0 and dtype.itemsize == 2 and _in_pieces(inputs, other_inputs)
    else:
        taken = blocks_cpu.takes(codes)
    if not taken:
        return floats.pack(in_order(codes), in_order(scales))
    at_once = max(1, AT_ONCE // (outputs * row_bytes))

    def encoded(index: int) -> list[Tensor]:
        some = slice(index * at_once, (index + 1) * at_once)
        return [in_order(x[some]).flatten(0, 1) for x in (codes, scales)]

    return stack(cast(Codec, sys.modules[__name__]), encoded, (count, outputs, inputs), at_once)


def _in_pieces(*inputs: int) -> bool:
    return all(mxfp4_cuda.takes(one) for one in inputs)


def kept_bits(outputs: int, inputs: int, other_inputs: int, device: torch.device) -> float:
    """What `experts` keeps of a weight with its share of its scale, for a dtype of 16 bits."""
    packed = ops.available() if device.type == "cpu" else _in_pieces(inputs, other_inputs)
    return BITS * (padded(outputs) if packed else outputs) / max(outputs, 1)


def pack(codes: Tensor, scales: Tensor) -> Packed:
    """codes uint8 [O, I / 2], the first of two inputs in the lower bits, and scales uint8 [O, I / 32]."""
    return (mxfp4_cuda if codes.is_cuda else mxfp4_cpu).pack(codes, scales)


def dequantize(packed: Packed, dtype: torch.dtype, first: int, last: int) -> Tensor:
    """Outputs first to last of the weight, [last - first, I]; first is a block's."""
    if isinstance(packed, mxfp4_cpu.Packed):
        return blocks_cpu.dequantize(packed.of_blocks, dtype, first, last)
    part = packed.part(first, last)
    if dtype != torch.float32:
        return dequantize_pieces.dequantize(part, dtype)
    return floats.dequantize(Floats(*mxfp4_cuda.unpack(part)), dtype)
