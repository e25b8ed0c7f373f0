"""IQ4_NL, a format of ggml's: codes of 4 bits stand for numbers of a table; 32 inputs share an f16 scale.

The table's numbers have 8 bits, so q8_0's kernels take them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import block_bits, q8_0
from .super_blocks_form import Form

TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FORM = Form(super=32, group=32, bits=8, zero=0, bytes=18, minima=False)
GROUP = FORM.super
# What the largest of a group becomes when scales are tried: about either end of the table.
ENDS = (*range(-135, -119), *range(105, 121))
dequantize, linear, variants = q8_0.dequantize, q8_0.linear, q8_0.variants
pack, kept_bits = q8_0.pack, q8_0.kept_bits


def from_blocks(blocks: Tensor) -> q8_0.Encoded:
    """blocks uint8 [O, I / 32 * 18], as ggml's files hold them."""
    scales, codes = blocks.contiguous().view(len(blocks), -1, FORM.bytes).split((2, 16), -1)
    table = torch.tensor(TABLE, dtype=torch.int8, device=blocks.device)
    values = table[block_bits.fields(codes, 4).flatten(1).int()]
    return q8_0.signed(values, block_bits.f16(scales).squeeze(-1))


def encode_groups(groups: Tensor) -> Tensor:
    """f32 [O, S, 1, 32] → blocks [O, S, 18]."""
    scales = scales_of(groups).to(torch.float16)
    codes = codes_of(groups, scales.float())
    return block_bits.joined(scales, block_bits.join(codes.unflatten(-1, (2, 16)), 4))


def scales_of(groups: Tensor) -> Tensor:
    """f32 [..., 32] → scales [...], of either sign: of those that are tried the best one by least squares."""
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
    table = torch.tensor(TABLE, dtype=torch.float32, device=groups.device)
    found, best = torch.zeros_like(largest), torch.zeros_like(largest)
    for end in ENDS:
        values = table[codes_of(groups, largest / end).int()]
        products, squares = (values * groups).sum(-1), values.square().sum(-1)
        gain = products.square() / squares  # by which the squared error is smaller than the squares of the weights
        found, best = torch.where(gain > best, products / squares, found), torch.maximum(gain, best)
    return found


def codes_of(groups: Tensor, scales: Tensor) -> Tensor:
    """The nearest numbers' codes of f32 [..., 32] by scales [...]: uint8 [..., 32]."""
    table = torch.tensor(TABLE, dtype=torch.float32, device=groups.device)
    inverse = torch.where(scales == 0, 0, 1 / scales)
    return torch.bucketize(groups * inverse.unsqueeze(-1), (table[1:] + table[:-1]) / 2).to(torch.uint8)
