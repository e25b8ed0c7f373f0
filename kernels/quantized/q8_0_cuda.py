"""q8_0 on GPUs: pieces of 16 outputs by 32 inputs (q8_0.cuh), codes of 8 bits and an f16 scale for each output."""

from __future__ import annotations

import torch
from torch import Tensor

from . import byte_pieces
from .byte_pieces import GROUP
from .pieces_cuda import Layout, Packed

PIECE = 544  # bytes of a piece
SIGN = 128  # stored inverted, so that codes are numbers from 0 on
LAYOUT = Layout("q8_0", GROUP, PIECE, widening=0.62)


def pack(codes: Tensor, scales: Tensor) -> Packed:
    """codes [O, I] int8 and scales [O, I / 32] f16, by which the codes are multiplied; on any device."""
    return byte_pieces.pack(codes, scales, LAYOUT, SIGN)


def unpack(packed: Packed) -> tuple[Tensor, Tensor]:
    """The codes [O, I] int8 and scales [O, I / 32] f16 that `pack` was given."""
    codes, scales = byte_pieces.unpack(packed, torch.float16, SIGN)
    return codes.view(torch.int8), scales
