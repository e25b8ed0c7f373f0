"""Q5_1, a format of ggml's: codes of 5 bits; 32 inputs share an f16 scale and an f16 that is added.

Codes are kept in 8 bits."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from . import block_bits, super_blocks
from .super_blocks import Decoded
from .super_blocks_form import Form

FORM = Form(super=32, group=32, bits=8, zero=0, bytes=24)
GROUP = FORM.super

dequantize, linear, variants = super_blocks.dequantize, super_blocks.linear, super_blocks.variants
kept_bits = functools.partial(super_blocks.kept_bits, FORM)


def decode(blocks: Tensor) -> Decoded:
    """blocks uint8 [O, S, 24]."""
    factors, high, low = blocks.split((4, 4, 16), -1)
    codes = block_bits.fields(low, 4).flatten(2) | block_bits.fields(high.unsqueeze(-1), 1).flatten(2) << 4
    ones = torch.ones(blocks.shape[:2], dtype=torch.int8, device=blocks.device)
    return Decoded(codes.flatten(1), block_bits.f16(factors), ones, -ones)


def encode_groups(groups: Tensor) -> Tensor:
    """f32 [O, S, 1, 32] → blocks [O, S, 24]."""
    factors, codes = super_blocks.spanned(groups.squeeze(2), 31)
    high = block_bits.join((codes >> 4).unflatten(-1, (4, 8, 1)), 1).flatten(2)
    return block_bits.joined(factors, high, block_bits.join((codes & 15).unflatten(-1, (2, 16)), 4))


def encode(weight: Tensor) -> tuple[Tensor]:
    """weight [O, I] of any float dtype → blocks uint8 [O, bytes], as gguf-py's, bit for bit."""
    return (super_blocks.encode(weight, FORM, encode_groups),)


def from_blocks(blocks: Tensor) -> tuple[Tensor]:
    """blocks uint8 [O, bytes], as ggml's files hold them: they are kept for `pack`."""
    return (blocks,)


def pack(blocks: Tensor) -> super_blocks.Packed:
    """What `linear` likes best on the blocks' device."""
    return super_blocks.pack(blocks, FORM, decode)
