"""MXFP4 on GPUs: pieces of 16 outputs by 64 inputs (mxfp4.cuh), codes of 4 bits and a scale e8m0 for each 32 inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from . import int4_cuda
from .int4_cuda import INPUTS
from .pieces_cuda import STRIP, Layout, Packed

GROUP = 32  # inputs of a scale
HEADER = "mxfp4"
LAYOUT = Layout(HEADER, INPUTS, 544, widening=0.66)  # widening: by the number of instructions; not timed


def takes(inputs: int) -> bool:
    return inputs > 0 and inputs % INPUTS == 0


def pack(codes: Tensor, scales: Tensor) -> Packed:
    """codes uint8 [O, I / 2], the first of two inputs in the lower bits, and scales uint8 [O, I / 32]; any device."""
    outputs, strips, pieces = len(codes), -(-len(codes) // STRIP), codes.shape[1] * 2 // INPUTS
    each = codes.new_zeros(strips * STRIP, pieces * INPUTS)
    each[:outputs, ::2], each[:outputs, 1::2] = codes & 15, codes >> 4
    whole = scales.new_zeros(strips * STRIP, scales.shape[1])
    whole[:outputs] = scales
    # strip, half, g, piece, group   ->   strip, piece, g, group, half
    of_scales = whole.view(strips, 2, 8, pieces, -1).permute(0, 3, 2, 4, 1).reshape(strips, pieces, -1)
    return Packed(torch.cat((int4_cuda.words_of(each), of_scales), 2), outputs, LAYOUT)


def unpack(packed: Packed) -> tuple[Tensor, Tensor]:
    """The reverse."""
    strips, pieces, _ = packed.pieces.shape
    each = int4_cuda.codes_of(packed.pieces[..., :512])[: packed.outputs]
    of_scales = packed.pieces[..., 512:].reshape(strips, pieces, 8, -1, 2).permute(0, 4, 2, 1, 3)
    scales = of_scales.reshape(strips * STRIP, -1)[: packed.outputs].contiguous()
    return each[:, ::2] | each[:, 1::2] << 4, scales
