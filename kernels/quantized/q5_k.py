"""Q5_K, a format of ggml's: codes of 5 bits; 32 inputs share a scale and a minimum of 6 bits, 256 two f16 factors.

Codes are kept in 6 bits."""

from __future__ import annotations

import functools

from torch import Tensor

from . import block_bits, k_encoder, super_blocks
from .super_blocks import Decoded
from .super_blocks_form import Form

FORM = Form(super=256, group=32, bits=6, zero=0, bytes=176, encoder="q5_k")
GROUP = FORM.super

dequantize, linear, variants = super_blocks.dequantize, super_blocks.linear, super_blocks.variants
kept_bits, from_blocks = functools.partial(super_blocks.kept_bits, FORM), super_blocks.from_blocks


def decode(blocks: Tensor) -> Decoded:
    """blocks uint8 [O, S, 176]."""
    factors, numbers, high, low = blocks.split((4, 12, 32, 128), -1)
    scales, minima = block_bits.k_scales(numbers)
    codes = block_bits.fields(low.unflatten(-1, (4, 32)), 4).flatten(2) | block_bits.fields(high, 1).flatten(2) << 4
    return Decoded(codes.flatten(1), block_bits.f16(factors), scales.flatten(1).char(), minima.flatten(1).char())


def encode_groups(groups: Tensor) -> Tensor:
    """f32 [O, S, 8, 32] → blocks [O, S, 176]."""
    factors, scales, minima, codes = k_encoder.with_minima(groups, most=31, numbers=63)
    numbers = block_bits.join_k_scales(scales, minima)
    low = block_bits.join((codes & 15).unflatten(-2, (4, 2)), 4)
    return block_bits.joined(factors, numbers, block_bits.join(codes >> 4, 1), low)


encode = functools.partial(super_blocks.encode, FORM, encode_groups)
pack = functools.partial(super_blocks.pack, FORM, decode)
