"""MXFP4 of experts on CPUs, as a codec of stacks: codes e2m1 with a scale e8m0 for 32 inputs, floats.py."""

from __future__ import annotations

import torch
from torch import Tensor

from . import blocks_cpu, mxfp4_cpu
from .mxfp4_cpu import pack

__all__ = ["dequantize", "pack"]


def dequantize(packed: mxfp4_cpu.Packed, dtype: torch.dtype, first: int, last: int) -> Tensor:
    """Outputs first to last of the weight, [last - first, I]; first is a block's."""
    return blocks_cpu.dequantize(packed.of_blocks, dtype, first, last)
