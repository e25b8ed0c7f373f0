"""Super-blocks on CPUs: super_blocks_cpu.cpp, in blocks (blocks_cpu.py)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..cpp import ops
from . import blocks_cpu, target
from .blocks_cpu import BLOCK, MOST_ROWS
from .digits_cpu import RUN
from .super_blocks_form import Form

__all__ = ["BLOCK", "FACTORS", "MOST_ROWS", "Packed", "available", "pack", "super_bytes", "takes"]

FACTORS = 4 * BLOCK  # bytes of a super-block


class Packed(NamedTuple):
    """A weight [O, I] in blocks of 16 outputs, the last one filled up with zeros."""

    blocks: Tensor  # uint8 [ceil(O / 16), I / super, bytes]
    outputs: int
    form: Form

    @property
    def inputs(self) -> int:
        return self.blocks.shape[1] * self.form.super

    @property
    def of_blocks(self) -> blocks_cpu.Blocks:
        name = f"super_blocks_{self.form.bits}_{RUN // self.form.group}"
        of = self.form.super, self.form.zero
        return blocks_cpu.Blocks("super_blocks_cpu", name, self.blocks, self.outputs, self.inputs, *of)


def available() -> bool:
    return ops.available()


def takes(blocks: Tensor) -> bool:
    return target.of(blocks) == "cpu" and blocks.numel() > 0 and ops.available()


def super_bytes(form: Form) -> int:
    """Of sixteen outputs."""
    return FACTORS + form.super // RUN * _run_bytes(form)


def _run_bytes(form: Form) -> int:
    return RUN // form.group * 2 * BLOCK + BLOCK * RUN * form.bits // 8


def pack(codes: Tensor, factors: Tensor, scales: Tensor, minima: Tensor, form: Form) -> Tensor:
    """Blocks of what a `Decoded` has."""
    supers, runs = codes.shape[1] // form.super, form.super // RUN
    of_codes = blocks_cpu.lie_together(codes, form.bits)
    blocks = codes.new_empty(len(of_codes), supers, super_bytes(form))
    # block output super-block, scales or minima   ->   block super-block, scales or minima, output
    halves = blocks_cpu.blocked(factors.flatten(1), 2 * supers).unflatten(2, (supers, 2)).permute(0, 2, 3, 1)
    blocks[..., :FACTORS] = halves.reshape(len(blocks), supers, -1).view(torch.uint8)
    of_runs = blocks[..., FACTORS:].view(len(blocks), supers, runs, -1)
    numbers = blocks_cpu.blocked(torch.stack((scales, minima), 2).flatten(1), 2 * scales.shape[1])
    ends = RUN // form.group * 2 * BLOCK
    numbers = numbers.unflatten(2, (supers, runs, -1, 2)).permute(0, 2, 3, 4, 5, 1)
    of_runs[..., :ends] = numbers.reshape(len(blocks), supers, runs, -1).view(torch.uint8)
    of_runs[..., ends:] = of_codes.view(len(blocks), supers, runs, -1)
    return blocks
