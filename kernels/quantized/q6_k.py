"""Q6_K, a format of ggml's: codes of 6 bits; 16 inputs share a scale of 8 bits, 256 an f16 factor.

Codes are kept in 6 bits, in another order."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from . import block_bits, k_encoder, super_blocks
from .super_blocks import Decoded
from .super_blocks_form import Form

FORM = Form(super=256, group=16, bits=6, zero=32, bytes=210, minima=False, encoder="q6_k")
GROUP = FORM.super

dequantize, linear, variants = super_blocks.dequantize, super_blocks.linear, super_blocks.variants
kept_bits, from_blocks = functools.partial(super_blocks.kept_bits, FORM), super_blocks.from_blocks


def decode(blocks: Tensor) -> Decoded:
    """blocks uint8 [O, S, 210]."""
    low, high, scales, factors = blocks.split((128, 64, 16, 2), -1)
    codes = block_bits.fields(low.unflatten(-1, (2, 64)), 4).flatten(2)
    codes |= block_bits.fields(high.unflatten(-1, (2, 32)), 2).flatten(2) << 4
    scales = scales.flatten(1).view(torch.int8)
    factors = block_bits.f16(factors).expand(*factors.shape[:2], 2)
    return Decoded(codes.flatten(1), factors, scales, torch.zeros_like(scales))


def encode_groups(groups: Tensor) -> Tensor:
    """f32 [O, S, 16, 16] → blocks [O, S, 210]."""
    factors, scales, codes = k_encoder.signed(groups, most=32, numbers=128)
    codes = codes.flatten(2)
    low = block_bits.join((codes & 15).unflatten(-1, (2, 2, 64)), 4)
    high = block_bits.join((codes >> 4).unflatten(-1, (2, 4, 32)), 2)
    return block_bits.joined(low, high, scales.view(torch.uint8), factors)


encode = functools.partial(super_blocks.encode, FORM, encode_groups)
pack = functools.partial(super_blocks.pack, FORM, decode)
