"""Q3_K, a format of ggml's: codes of 3 bits; 16 inputs share a scale of 6 bits, 256 an f16 factor.

Codes are kept in 4 bits."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from . import block_bits, k_encoder, super_blocks
from .super_blocks import Decoded
from .super_blocks_form import Form

FORM = Form(super=256, group=16, bits=4, zero=4, bytes=110, minima=False, encoder="q3_k")
GROUP = FORM.super

dequantize, linear, variants = super_blocks.dequantize, super_blocks.linear, super_blocks.variants
kept_bits, from_blocks = functools.partial(super_blocks.kept_bits, FORM), super_blocks.from_blocks


def decode(blocks: Tensor) -> Decoded:
    """blocks uint8 [O, S, 110]."""
    high, low, numbers, factors = blocks.split((32, 64, 12, 2), -1)
    codes = block_bits.fields(low.unflatten(-1, (2, 32)), 2).flatten(2) | block_bits.fields(high, 1).flatten(2) << 2
    scales = block_bits.fields(numbers[..., :8], 4).flatten(2) | block_bits.fields(numbers[..., 8:], 2).flatten(2) << 4
    scales = scales.flatten(1).char() - 32
    factors = block_bits.f16(factors).expand(*factors.shape[:2], 2)
    return Decoded(codes.flatten(1), factors, scales, torch.zeros_like(scales))


def encode_groups(groups: Tensor) -> Tensor:
    """f32 [O, S, 16, 16] → blocks [O, S, 110]."""
    factors, scales, codes = k_encoder.signed(groups, most=4, numbers=32)
    codes, scales = codes.flatten(2), (scales + 32).to(torch.uint8)
    high = block_bits.join((codes >> 2).unflatten(-1, (8, 32)), 1)
    low = block_bits.join((codes & 3).unflatten(-1, (2, 4, 32)), 2)
    fours = block_bits.join((scales & 15).unflatten(-1, (2, 8)), 4)
    return block_bits.joined(high, low, fours, block_bits.join((scales >> 4).unflatten(-1, (4, 4)), 2), factors)


encode = functools.partial(super_blocks.encode, FORM, encode_groups)
pack = functools.partial(super_blocks.pack, FORM, decode)
