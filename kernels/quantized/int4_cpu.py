"""Codes of 4 bits with a scale and a zero point a group on CPUs: int4_cpu.cpp, in blocks (blocks_cpu.py)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import blocks_cpu
from .blocks_cpu import BLOCK
from .digits_cpu import RUN

ZERO = 8  # where none is stored


class Packed(NamedTuple):
    """A weight [O, I] in blocks of 16 outputs, the last one filled up with zeros."""

    # uint8 [O / 16, groups, bytes]: of each 16 f16 scales, with `zeros` 16 zero points, then the codes
    blocks: Tensor
    outputs: int
    group: int  # inputs of one
    zeros: bool  # whether zero points are stored

    @property
    def inputs(self) -> int:
        return self.blocks.shape[1] * self.group

    @property
    def of_blocks(self) -> blocks_cpu.Blocks:
        name = "int4_zeros" if self.zeros else "int4"
        return blocks_cpu.Blocks("int4_cpu", name, self.blocks, self.outputs, self.inputs, self.group, ZERO)


def head_bytes(zeros: bool) -> int:
    """Of a group of sixteen outputs, before the codes."""
    return (3 if zeros else 2) * BLOCK


def kept_bits(group: int, zeros: bool) -> float:
    """Of a weight with its share of the rest."""
    return (head_bytes(zeros) + BLOCK * group // 2) * 8 / (BLOCK * group)


def pack(codes: Tensor, scales: Tensor, zeros: Tensor, stored_zeros: bool = False) -> Packed:
    """codes [O, I] uint8 below 16, scales [O, G] that f16 holds and zeros [O, G] up to 127.

    Groups have a multiple of 32 inputs. stored_zeros: also where all are ZERO.
    """
    (outputs, inputs), groups = codes.shape, scales.shape[1]
    stored = stored_zeros or bool(((zeros != ZERO) & (scales != 0)).any())  # outputs that fill up have neither
    of_codes, head = blocks_cpu.lie_together(codes, 4), head_bytes(stored)
    blocks = codes.new_empty(len(of_codes), groups, head + inputs // groups // RUN * of_codes.shape[2])
    blocks[..., : 2 * BLOCK].view(torch.float16).copy_(blocks_cpu.blocked(scales, groups).mT)
    if stored:
        blocks[..., 2 * BLOCK : head] = blocks_cpu.blocked(zeros.to(torch.uint8), groups).mT
    blocks[..., head:] = of_codes.view(len(of_codes), groups, -1)
    return Packed(blocks, outputs, inputs // groups, stored)
