"""Q4_1, a format of ggml's: codes of 4 bits; 32 inputs share an f16 scale and an f16 that is added."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from . import block_bits, group_encoder, super_blocks
from .super_blocks import Decoded
from .super_blocks_form import Form

FORM = Form(super=32, group=32, bits=4, zero=0, bytes=20, encoder="q4_1")
GROUP = FORM.super

dequantize, linear, variants = super_blocks.dequantize, super_blocks.linear, super_blocks.variants
kept_bits, from_blocks = functools.partial(super_blocks.kept_bits, FORM), super_blocks.from_blocks


def decode(blocks: Tensor) -> Decoded:
    """blocks uint8 [O, S, 20]."""
    factors, codes = blocks.split((4, 16), -1)
    ones = torch.ones(blocks.shape[:2], dtype=torch.int8, device=blocks.device)
    return Decoded(block_bits.fields(codes, 4).flatten(1), block_bits.f16(factors), ones, -ones)


def encode_groups(groups: Tensor) -> Tensor:
    """f32 [O, S, 1, 32] → blocks [O, S, 20]."""
    factors, codes = group_encoder.spanned(groups.squeeze(2), 15)
    return block_bits.joined(factors, block_bits.join(codes.unflatten(-1, (2, 16)), 4))


encode = functools.partial(super_blocks.encode, FORM, encode_groups)  # as gguf-py, bit for bit
pack = functools.partial(super_blocks.pack, FORM, decode)
