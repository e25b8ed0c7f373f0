"""e4m3 on GPUs: pieces of 16 outputs by 32 inputs (e4m3.cuh), codes of 8 bits and an f32 scale for each output."""

from __future__ import annotations

import torch
from torch import Tensor

from .pieces_cuda import STRIP, Layout, Packed

GROUP = 32  # inputs of a piece, of which an output has one scale
PIECE = 576  # bytes of a piece
LAYOUT = Layout("e4m3", GROUP, PIECE, widening=0.6)


def pack(codes: Tensor, scales: Tensor) -> Packed:
    """codes [O, I] uint8 and scales [O, I / 32] f32, which weights are the products of; on any device."""
    outputs, inputs = codes.shape
    if inputs % GROUP or scales.shape != (outputs, inputs // GROUP):
        raise ValueError(f"e4m3 needs one scale for each {GROUP} inputs: codes {codes.shape}, scales {scales.shape}")
    strips, groups = -(-outputs // STRIP), inputs // GROUP
    whole = codes.new_zeros(strips * STRIP, inputs)
    whole[:outputs] = codes
    # Of an output: half h, lane's g. Of an input: step s, byte's second bit e, lane's t, byte's first bit b.
    parts = whole.view(strips, 2, 8, groups, 2, 2, 4, 2)
    #                  strip h  g  group   s  b  t  e   ->   strip group g t s h e b
    words = parts.permute(0, 3, 2, 6, 4, 1, 7, 5).reshape(strips, groups, 512)
    by = scales.new_zeros(strips * STRIP, groups, dtype=torch.float32)
    by[:outputs] = scales
    pairs = by.view(strips, 2, 8, groups).permute(0, 3, 2, 1).contiguous().view(torch.uint8)
    return Packed(torch.cat((words, pairs.view(strips, groups, PIECE - 512)), 2), outputs, LAYOUT)


def unpack(packed: Packed) -> tuple[Tensor, Tensor]:
    """The codes [O, I] uint8 and scales [O, I / 32] f32 that `pack` was given."""
    strips, groups, _ = packed.pieces.shape
    words = packed.pieces[..., :512].reshape(strips, groups, 8, 4, 2, 2, 2, 2)
    codes = words.permute(0, 5, 2, 1, 4, 7, 3, 6).reshape(strips * STRIP, groups * GROUP)
    pairs = packed.pieces[..., 512:].contiguous().view(torch.float32).view(strips, groups, 8, 2)
    scales = pairs.permute(0, 3, 2, 1).reshape(strips * STRIP, groups)
    return codes[: packed.outputs], scales[: packed.outputs]
