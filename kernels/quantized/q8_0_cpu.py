"""Q8_0 on CPUs: q8_0_cpu.cpp, in blocks (blocks_cpu.py)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..cpp import ops
from . import blocks_cpu
from .blocks_cpu import BLOCK, MOST_ROWS, takes

__all__ = ["BLOCK", "GROUP", "MOST_ROWS", "Packed", "encode", "pack", "takes"]

GROUP = 32  # weights with one scale


class Packed(NamedTuple):
    """A weight [O, I] in blocks of 16 outputs, the last one filled up with zeros."""

    # uint8 [O / 16, I / 32, 544]: of each group 16 f16 scales, then codes + 128 [8, 16, 4]: fours of inputs, outputs
    blocks: Tensor
    outputs: int

    @property
    def inputs(self) -> int:
        return self.blocks.shape[1] * GROUP

    @property
    def of_blocks(self) -> blocks_cpu.Blocks:
        return blocks_cpu.Blocks("q8_0_cpu", "q8_0", self.blocks, self.outputs, self.inputs, GROUP, 128)


def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [O, I] and scales [O, I / 32] of a contiguous weight in f32, bf16 or f16."""
    codes = weight.new_empty(weight.shape, dtype=torch.int8)
    scales = weight.new_empty(len(weight), weight.shape[1] // GROUP, dtype=torch.float32)
    ops.typed("q8_0_cpu", "q8_0_encode", weight.dtype)(weight, codes, scales, scales.numel())
    return codes, scales.to(torch.float16)


def pack(codes: Tensor, scales: Tensor) -> Packed:
    outputs, groups = scales.shape
    blocks = codes.new_empty(-(-outputs // BLOCK), groups, BLOCK * (2 + GROUP), dtype=torch.uint8)
    blocks[:, :, : 2 * BLOCK].view(torch.float16).copy_(blocks_cpu.blocked(scales, groups).mT)
    blocks[:, :, 2 * BLOCK :] = blocks_cpu.lie_together(codes.view(torch.uint8), 8)
    blocks[:, :, 2 * BLOCK :] ^= 128
    return Packed(blocks, outputs)
