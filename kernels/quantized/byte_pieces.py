"""Pieces of 16 outputs by 32 inputs that q8_0.cuh and e4m3.cuh take: codes of 8 bits, and a scale for each output."""

from __future__ import annotations

import torch
from torch import Tensor

from .pieces_cuda import STRIP, Layout, Packed

GROUP = 32  # inputs of a scale, and of a piece
CODES = STRIP * GROUP  # bytes of a piece that are codes; its scales follow


def pack(codes: Tensor, scales: Tensor, layout: Layout, flipped: int = 0) -> Packed:
    """codes [O, I] of 8 bits and scales [O, I / 32], by which the codes are multiplied; on any device.

    flipped: bits of the codes that are stored inverted.
    """
    outputs, inputs = codes.shape
    if inputs % GROUP or scales.shape != (outputs, inputs // GROUP):
        wanted = f"{layout.header} needs one scale for each {GROUP} inputs"
        raise ValueError(f"{wanted}: codes {codes.shape}, scales {scales.shape}")
    strips, groups = -(-outputs // STRIP), inputs // GROUP
    whole = codes.new_zeros(strips * STRIP, inputs)
    whole[:outputs] = codes
    # Of an output: half h, lane's g. Of an input: step s, byte's second bit e, lane's t, byte's first bit b.
    parts = whole.view(strips, 2, 8, groups, 2, 2, 4, 2)
    #                  strip h  g  group   s  b  t  e   ->   strip group g t s h e b
    words = parts.permute(0, 3, 2, 6, 4, 1, 7, 5).reshape(strips, groups, CODES)
    by = scales.new_zeros(strips * STRIP, groups)
    by[:outputs] = scales
    pairs = by.view(strips, 2, 8, groups).permute(0, 3, 2, 1).contiguous().view(torch.uint8)
    pieces = torch.cat((words.view(torch.uint8) ^ flipped, pairs.view(strips, groups, layout.bytes - CODES)), 2)
    return Packed(pieces, outputs, layout)


def unpack(packed: Packed, dtype: torch.dtype, flipped: int = 0) -> tuple[Tensor, Tensor]:
    """The codes [O, I], as uint8, and scales [O, I / 32] of `dtype` that `pack` was given."""
    strips, groups, _ = packed.pieces.shape
    words = (packed.pieces[..., :CODES] ^ flipped).view(strips, groups, 8, 4, 2, 2, 2, 2)
    codes = words.permute(0, 5, 2, 1, 4, 7, 3, 6).reshape(strips * STRIP, groups * GROUP)
    pairs = packed.pieces[..., CODES:].contiguous().view(dtype).view(strips, groups, 8, 2)
    scales = pairs.permute(0, 3, 2, 1).reshape(strips * STRIP, groups)
    return codes[: packed.outputs], scales[: packed.outputs]
