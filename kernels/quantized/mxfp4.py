"""MXFP4 of experts, in the form that their device reads. It is a codec of stacks (stack.py)."""

from __future__ import annotations

import sys
from typing import cast

import torch
from torch import Tensor

from ..cpp import ops
from . import blocks_cpu, floats, mxfp4_cpu, mxfp4_cuda, pieces_cuda
from .floats import Floats
from .stack import Codec, Stack, padded, stack

BITS = 4.25  # of a weight with its share of its group's scale

Packed = mxfp4_cpu.Packed | pieces_cuda.Packed


def experts(weights: Floats) -> Floats | Stack:
    """Weights [E, O, I]: packed, where kernels of the device take them so."""
    (count, outputs, inputs), codes = weights.shape, weights.codes
    taken = (codes.numel() > 0 and mxfp4_cuda.takes(inputs)) if codes.is_cuda else blocks_cpu.takes(codes)
    return stack(cast(Codec, sys.modules[__name__]), weights.expert, (count, outputs, inputs)) if taken else weights


def kept_bits(outputs: int, inputs: int, device: torch.device) -> float:
    """What `experts` keeps of a weight with its share of its scale."""
    packed = ops.available() if device.type == "cpu" else mxfp4_cuda.takes(inputs)
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
        return pieces_cuda.dequantize(part, dtype)
    return floats.dequantize_reference(Floats(*mxfp4_cuda.unpack(part)), dtype, 0, last - first)
