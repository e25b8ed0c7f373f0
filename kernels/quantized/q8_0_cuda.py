"""q8_0 on GPUs: pieces of 16 outputs by 32 inputs (q8_0.cuh), codes of 8 bits and an f16 scale for each output."""

from __future__ import annotations

import torch
from torch import Tensor

from .pieces_cuda import STRIP, Layout, Packed

GROUP = 32  # inputs of a scale, and of a piece
PIECE = 544  # bytes of a piece
LAYOUT = Layout("q8_0", GROUP, PIECE, widening=0.56)


def pack(codes: Tensor, scales: Tensor) -> Packed:
    """codes [O, I] int8 and scales [O, I / 32] f16, which weights are the products of, for `linear`; on any device."""
    outputs, inputs = codes.shape
    if inputs % GROUP or scales.shape != (outputs, inputs // GROUP):
        raise ValueError(f"q8_0 needs one scale for each {GROUP} inputs: codes {codes.shape}, scales {scales.shape}")
    strips, groups = -(-outputs // STRIP), inputs // GROUP
    whole = codes.new_zeros(strips * STRIP, inputs)
    whole[:outputs] = codes
    # Of an output: half h, lane's g. Of an input: step s, byte's second bit e, lane's t, byte's first bit b.
    parts = whole.view(strips, 2, 8, groups, 2, 2, 4, 2)
    #                  strip h  g  group   s  b  t  e   ->   strip group g t s h e b
    words = parts.permute(0, 3, 2, 6, 4, 1, 7, 5).reshape(strips, groups, 512)
    by = scales.new_zeros(strips * STRIP, groups)
    by[:outputs] = scales
    pairs = by.view(strips, 2, 8, groups).permute(0, 3, 2, 1).contiguous().view(torch.uint8)
    pieces = torch.cat((words.view(torch.uint8) ^ 128, pairs.view(strips, groups, PIECE - 512)), 2)
    return Packed(pieces, outputs, LAYOUT)


def unpack(packed: Packed) -> tuple[Tensor, Tensor]:
    """The codes [O, I] int8 and scales [O, I / 32] f16 that `pack` was given."""
    strips, groups, _ = packed.pieces.shape
    words = (packed.pieces[..., :512] ^ 128).view(torch.int8).view(strips, groups, 8, 4, 2, 2, 2, 2)
    codes = words.permute(0, 5, 2, 1, 4, 7, 3, 6).reshape(strips * STRIP, groups * GROUP)
    pairs = packed.pieces[..., 512:].contiguous().view(torch.float16).view(strips, groups, 8, 2)
    scales = pairs.permute(0, 3, 2, 1).reshape(strips * STRIP, groups)
    return codes[: packed.outputs], scales[: packed.outputs]
