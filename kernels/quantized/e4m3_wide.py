"""e4m3 on GPUs where 128 inputs or more share a scale: pieces of 16 outputs by 128 inputs (e4m3_wide.cuh).

Each piece has its scales, also where its neighbours' are the same. So kernels of few rows read all of them alike, and
tensor cores of 8 bits know how many pieces they may add up (e4m3_wgmma.cu).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .pieces_cuda import STRIP, Layout, Packed

GROUP = 128  # inputs of a scale, and of a piece
PIECE = 2112  # bytes of a piece
CODES, HALF = 8 * GROUP, PIECE // 2  # bytes of half a piece: of its codes, and with its scales
# One row of an 8B Llama's linears is 8 to 22 % faster by a GEMM of few rows than by a GEMV (H200, 2026-11-25).
LAYOUT = Layout("e4m3_wide", GROUP, PIECE, widening=0.6, gemv_rows=0, chunk=256, streamed=64)
ALIKE = 4, 2, 1  # pieces with the same scales: more would be more than tensor cores add up precisely


def takes(inputs: int, unit: int) -> bool:
    """Whether weights of so many inputs, of which `unit` share a scale, can have these pieces."""
    return inputs % GROUP == 0 and unit % GROUP == 0 and inputs > 0


def layout(unit: int) -> Layout:
    """Of weights of which so many inputs share a scale, a multiple of 128."""
    return LAYOUT._replace(alike=next(count for count in ALIKE if unit % (count * GROUP) == 0))


def pack(codes: Tensor, scales: Tensor) -> Packed:
    """codes [O, I] uint8 and scales [O, G] f32, by which the codes are multiplied; on any device.

    I / G is a multiple of 128.
    """
    (outputs, inputs), of_output = codes.shape, max(scales.shape[-1], 1)
    if inputs % (GROUP * of_output) or scales.shape != (outputs, of_output):
        raise ValueError(
            f"e4m3_wide needs one scale for each {GROUP} inputs or more: codes {codes.shape}, scales {scales.shape}"
        )
    unit = inputs // of_output
    scales = scales.repeat_interleave(unit // GROUP, 1)
    strips, groups = -(-outputs // STRIP), inputs // GROUP
    pieces = codes.new_zeros(strips, groups, 2, HALF)
    whole, by = codes.new_zeros(strips * STRIP, inputs), scales.new_zeros(strips * STRIP, groups, dtype=torch.float32)
    whole[:outputs], by[:outputs] = codes, scales
    # Of an output: half h, g. Of an input: run r, byte's second bit e, four t, byte's first bit b.
    parts = whole.view(strips, 2, 8, groups, 8, 2, 4, 2)
    #           strip h g group r e t b  ->  strip group h r g t b e, with b and e as bytes {0, 8, 1, 9} have them
    pieces[..., :CODES] = parts.permute(0, 3, 1, 4, 2, 6, 7, 5).reshape(strips, groups, 2, CODES)
    eights = by.view(strips, 2, 8, groups).permute(0, 3, 1, 2).contiguous()
    pieces[..., CODES:] = eights.view(torch.uint8).view(strips, groups, 2, 32)
    return Packed(pieces.view(strips, groups, PIECE), outputs, layout(unit))


def unpack(packed: Packed) -> tuple[Tensor, Tensor]:
    """The codes [O, I] uint8 that `pack` was given, and a scale for each 128 inputs and those that are alike."""
    strips, groups, _ = packed.pieces.shape
    halves = packed.pieces.view(strips, groups, 2, HALF)
    words = halves[..., :CODES].reshape(strips, groups, 2, 8, 8, 4, 2, 2)  # strip group h r g t b e
    codes = words.permute(0, 2, 4, 1, 3, 7, 5, 6).reshape(strips * STRIP, groups * GROUP)
    scales = halves[..., CODES:].contiguous().view(torch.float32).permute(0, 2, 3, 1).reshape(strips * STRIP, groups)
    return codes[: packed.outputs], scales[: packed.outputs, :: packed.layout.alike].contiguous()
