"""Q5_0, a format of ggml's: codes of 5 bits; 32 inputs share an f16 scale.

Codes less their middle have no more than 8 bits, so q8_0's kernels take them.
"""

from __future__ import annotations

from torch import Tensor

from ..cpp import ops
from . import block_bits, group_encoder, q8_0, super_blocks
from .super_blocks_form import Form

FORM = Form(super=32, group=32, bits=8, zero=16, bytes=22, minima=False, encoder="q5_0")
GROUP = FORM.super
dequantize, linear, variants = q8_0.dequantize, q8_0.linear, q8_0.variants
pack, kept_bits = q8_0.pack, q8_0.kept_bits


def from_blocks(blocks: Tensor) -> q8_0.Encoded:
    """blocks uint8 [O, I / 32 * 22], as ggml's files hold them."""
    scales, high, low = blocks.contiguous().view(len(blocks), -1, FORM.bytes).split((2, 4, 16), -1)
    codes = block_bits.fields(low, 4).flatten(2) | block_bits.fields(high.unsqueeze(-1), 1).flatten(2) << 4
    return q8_0.signed(codes.flatten(1).char() - FORM.zero, block_bits.f16(scales).squeeze(-1))


def encode_groups(groups: Tensor) -> Tensor:
    """f32 [O, S, 1, 32] → blocks [O, S, 22]."""
    factors, codes = group_encoder.centred(groups.squeeze(2), FORM.zero)
    high = block_bits.join((codes >> 4).unflatten(-1, (4, 8, 1)), 1).flatten(2)
    return block_bits.joined(factors, high, block_bits.join((codes & 15).unflatten(-1, (2, 16)), 4))


def encode(weight: Tensor) -> q8_0.Encoded:
    """weight [O, I] of any float dtype → what gguf-py's blocks of it mean, bit for bit."""
    if ops.reads(weight):
        return q8_0.Encoded(*group_encoder.encode_signed_q5_0(weight))
    return from_blocks(*super_blocks.encode(FORM, encode_groups, weight))
