"""IQ4_NL, a format of ggml's: codes of 4 bits stand for numbers of a table; 32 inputs share an f16 scale.

The table's numbers have 8 bits, so q8_0's kernels take them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import block_bits, q8_0

TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
GROUP = 32
dequantize, linear, variants = q8_0.dequantize, q8_0.linear, q8_0.variants
pack, kept_bits = q8_0.pack, q8_0.kept_bits


def from_blocks(blocks: Tensor) -> q8_0.Encoded:
    """blocks uint8 [O, I / 32 * 18], as ggml's files hold them."""
    scales, codes = blocks.contiguous().view(len(blocks), -1, 18).split((2, 16), -1)
    table = torch.tensor(TABLE, dtype=torch.int8, device=blocks.device)
    values = table[block_bits.fields(codes, 4).flatten(1).int()]
    return q8_0.signed(values, block_bits.f16(scales).squeeze(-1))
