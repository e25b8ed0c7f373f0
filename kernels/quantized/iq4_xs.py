"""IQ4_XS, a format of ggml's: codes of 4 bits stand for numbers of a table. 32 inputs share a scale of 6 bits, 256 an
f16 factor.

The table's numbers are kept, in 8 bits."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from . import block_bits, iq4_nl, scale_search, super_blocks
from .super_blocks import Decoded
from .super_blocks_form import Form

FORM = Form(super=256, group=32, bits=8, zero=128, bytes=136, minima=False)
GROUP = FORM.super

dequantize, linear, variants = super_blocks.dequantize, super_blocks.linear, super_blocks.variants
kept_bits, from_blocks = functools.partial(super_blocks.kept_bits, FORM), super_blocks.from_blocks


def decode(blocks: Tensor) -> Decoded:
    """blocks uint8 [O, S, 136]."""
    factors, high, low, codes = blocks.split((2, 2, 4, 128), -1)
    scales = (
        block_bits.fields(low.unsqueeze(-1), 4).flatten(2) | block_bits.fields(high.unsqueeze(-1), 2).flatten(2) << 4
    )
    scales = scales.flatten(1).char() - 32
    codes = block_bits.fields(codes.unflatten(-1, (8, 16)), 4).flatten(1)
    values = torch.tensor(iq4_nl.TABLE, device=blocks.device) + FORM.zero
    factors = block_bits.f16(factors).expand(*factors.shape[:2], 2)
    return Decoded(values.to(torch.uint8)[codes.int()], factors, scales, torch.zeros_like(scales))


def encode_groups(groups: Tensor) -> Tensor:
    """f32 [O, S, 8, 32] → blocks [O, S, 136]."""
    scales = iq4_nl.scales_of(groups)
    largest = scales.gather(-1, scales.abs().argmax(-1, keepdim=True))
    factors = (largest / -32).clamp(-65504, 65504).to(torch.float16)
    whole = scale_search.codes_of(scales, factors.float().squeeze(-1), -32, 31)
    codes = iq4_nl.codes_of(groups, factors.float() * whole)
    numbers = (whole + 32).to(torch.uint8)
    high = block_bits.join((numbers >> 4).unflatten(-1, (2, 4)).unsqueeze(-1), 2)
    low = block_bits.join((numbers & 15).unflatten(-1, (4, 2)).unsqueeze(-1), 4)
    return block_bits.joined(factors, high, low, block_bits.join(codes.unflatten(-1, (2, 16)), 4))


pack = functools.partial(super_blocks.pack, FORM, decode)
