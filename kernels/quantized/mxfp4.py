"""MXFP4 of experts, in the form that their device reads. It is a codec of stacks (stack.py), for CPUs."""

from __future__ import annotations

import sys
from typing import cast

import torch
from torch import Tensor

from ..cpp import ops
from . import blocks_cpu, mxfp4_cpu
from .floats import Floats
from .mxfp4_cpu import pack
from .stack import Codec, Stack, padded, stack

__all__ = ["dequantize", "experts", "kept_bits", "pack"]

BITS = 4.25  # of a weight with its share of its group's scale


def experts(weights: Floats) -> Floats | Stack:
    """Weights [E, O, I]: on CPUs with operations in blocks."""
    if not blocks_cpu.takes(weights.codes):
        return weights
    count, outputs, inputs = weights.shape
    return stack(cast(Codec, sys.modules[__name__]), weights.expert, (count, outputs, inputs))


def kept_bits(outputs: int, device: torch.device) -> float:
    """What `experts` keeps of a weight with its share of its scale."""
    filled = padded(outputs) if device.type == "cpu" and ops.available() else outputs
    return BITS * filled / max(outputs, 1)


def dequantize(packed: mxfp4_cpu.Packed, dtype: torch.dtype, first: int, last: int) -> Tensor:
    """Outputs first to last of the weight, [last - first, I]; first is a block's."""
    return blocks_cpu.dequantize(packed.of_blocks, dtype, first, last)
