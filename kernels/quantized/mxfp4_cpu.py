"""MXFP4 on CPUs: mxfp4_cpu.cpp, in blocks (blocks_cpu.py)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import blocks_cpu
from .blocks_cpu import BLOCK
from .digits_cpu import RUN

MIDDLE = 12  # what C++ adds to twice a code's number


class Packed(NamedTuple):
    """A weight [O, I] in blocks of 16 outputs, the last one filled up with zeros."""

    blocks: Tensor  # uint8 [O / 16, I / 32, 272]: of each group 16 scales, then the codes
    outputs: int

    @property
    def inputs(self) -> int:
        return self.blocks.shape[1] * RUN

    @property
    def of_blocks(self) -> blocks_cpu.Blocks:
        return blocks_cpu.Blocks("mxfp4_cpu", "mxfp4", self.blocks, self.outputs, self.inputs, RUN, MIDDLE)


def pack(codes: Tensor, scales: Tensor) -> Packed:
    """codes uint8 [O, I / 2], the first of two inputs in the lower bits, and scales uint8 [O, I / 32]."""
    each = torch.stack((codes & 15, codes >> 4), 2).flatten(1)
    of_scales = blocks_cpu.blocked(scales, scales.shape[1]).mT
    return Packed(torch.cat((of_scales, blocks_cpu.lie_together(each, 4)), 2), len(codes))


def unpack(packed: Packed) -> tuple[Tensor, Tensor]:
    """The reverse, with the outputs that fill up the last block; on any device."""
    strips, groups, _ = packed.blocks.shape
    scales = packed.blocks[..., :BLOCK].mT.reshape(strips * BLOCK, groups)
    fours = packed.blocks[..., BLOCK:].reshape(strips, groups, 4, BLOCK, 2, 2)  # of half an input's four: pairs
    first, second = fours[..., 0], fours[..., 1]  # strip group four output pair
    both = torch.stack((first & 15 | second << 4, first >> 4 | second & 240), 2)  # strip group half four output pair
    return both.permute(0, 4, 1, 2, 3, 5).reshape(strips * BLOCK, groups * RUN // 2), scales
