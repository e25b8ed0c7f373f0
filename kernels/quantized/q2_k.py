"""Q2_K, a format of ggml's: codes of 2 bits; 16 inputs share a scale and a minimum of 4 bits, 256 two f16 factors.

Codes are kept in 4 bits."""

from __future__ import annotations

import functools

from torch import Tensor

from . import block_bits, k_encoder, super_blocks
from .super_blocks import Decoded
from .super_blocks_form import Form

FORM = Form(super=256, group=16, bits=4, zero=0, bytes=84, encoder="q2_k")
GROUP = FORM.super

dequantize, linear, variants = super_blocks.dequantize, super_blocks.linear, super_blocks.variants
kept_bits, from_blocks = functools.partial(super_blocks.kept_bits, FORM), super_blocks.from_blocks


def decode(blocks: Tensor) -> Decoded:
    """blocks uint8 [O, S, 84]."""
    numbers, codes, factors = blocks.split((16, 64, 4), -1)
    codes = block_bits.fields(codes.unflatten(-1, (2, 32)), 2)
    numbers = numbers.flatten(1)
    return Decoded(codes.flatten(1), block_bits.f16(factors), (numbers & 15).char(), (numbers >> 4).char())


def encode_groups(groups: Tensor) -> Tensor:
    """f32 [O, S, 16, 16] → blocks [O, S, 84]."""
    factors, scales, minima, codes = k_encoder.with_minima(groups, most=3, numbers=15)
    low = block_bits.join(codes.flatten(2).unflatten(-1, (2, 4, 32)), 2)
    return block_bits.joined(scales | minima << 4, low, factors)


encode = functools.partial(super_blocks.encode, FORM, encode_groups)
pack = functools.partial(super_blocks.pack, FORM, decode)
