"""Q5_1, a format of ggml's: codes of 5 bits; 32 inputs share an f16 scale and an f16 that is added.

Codes are kept in 6 bits."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from . import block_bits, group_encoder, super_blocks
from .super_blocks import Decoded
from .super_blocks_form import Form

FORM = Form(super=32, group=32, bits=6, zero=0, bytes=24, encoder="q5_1")
GROUP = FORM.super

dequantize, linear, variants = super_blocks.dequantize, super_blocks.linear, super_blocks.variants
kept_bits, from_blocks = functools.partial(super_blocks.kept_bits, FORM), super_blocks.from_blocks


def decode(blocks: Tensor) -> Decoded:
    """blocks uint8 [O, S, 24]."""
    factors, high, low = blocks.split((4, 4, 16), -1)
    codes = block_bits.fields(low, 4).flatten(2) | block_bits.fields(high.unsqueeze(-1), 1).flatten(2) << 4
    ones = torch.ones(blocks.shape[:2], dtype=torch.int8, device=blocks.device)
    return Decoded(codes.flatten(1), block_bits.f16(factors), ones, -ones)


def encode_groups(groups: Tensor) -> Tensor:
    """f32 [O, S, 1, 32] → blocks [O, S, 24]."""
    factors, codes = group_encoder.spanned(groups.squeeze(2), 31)
    high = block_bits.join((codes >> 4).unflatten(-1, (4, 8, 1)), 1).flatten(2)
    return block_bits.joined(factors, high, block_bits.join((codes & 15).unflatten(-1, (2, 16)), 4))


encode = functools.partial(super_blocks.encode, FORM, encode_groups)  # as gguf-py, bit for bit
pack = functools.partial(super_blocks.pack, FORM, decode)
