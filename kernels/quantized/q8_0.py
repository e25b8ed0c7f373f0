"""Q8_0, a format of ggml's (gguf-py's quants.py): 32 weights along the inputs share an f16 scale, each is an int8.

A weight is its code times its group's scale: 8.5 bits. Steps of few rows read codes and scales as they lie. Of more
rows, dequantising a panel of the weight first and multiplying with the library is faster.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..cpp import ops
from . import blocks_cpu, dequantize_pieces, panels, pieces_cuda, q8_0_cpu, q8_0_cuda, target
from .q8_0_cpu import GROUP

BITS = 8.5  # of a weight with its share of the scale
CHUNK = 1 << 22  # elements that are encoded at once: what that takes is small beside a matrix


class Encoded(NamedTuple):
    """A weight [O, I] as `encode` makes it: where no kernel wants it in another layout."""

    codes: Tensor  # int8 [O, I]
    scales: Tensor  # f16 [O, I / 32]

    @property
    def outputs(self) -> int:
        return len(self.codes)


Packed = Encoded | q8_0_cpu.Packed | pieces_cuda.Packed


def encode(weight: Tensor) -> Encoded:
    """weight [O, I] of any float dtype → codes int8 [O, I] and scales f16 [O, I / 32], as gguf-py's, bit for bit.

    A group's scale is max|w| / 127, and codes are rounded half away from zero, before the scale is rounded to f16.
    """
    outputs, inputs = weight.shape
    codes = weight.new_empty(outputs, inputs, dtype=torch.int8)
    scales = weight.new_empty(outputs, inputs // GROUP, dtype=torch.float16)
    rows = max(1, CHUNK // max(inputs, 1))
    compiled = ops.reads(weight)
    for first in range(0, outputs, rows):
        part = slice(first, first + rows)
        codes[part], scales[part] = (q8_0_cpu.encode if compiled else encode_reference)(weight[part])
    return Encoded(codes, scales)


def encode_reference(weight: Tensor) -> tuple[Tensor, Tensor]:
    groups = weight.float().view(len(weight), -1, GROUP)
    # Divided by a tensor: by a Python number, GPUs multiply with the reciprocal, which rounds differently.
    scales = groups.abs().amax(2, keepdim=True) / torch.full((), 127.0, device=weight.device)
    x = groups * torch.where(scales == 0, 0, 1 / scales)
    size = x.abs()
    codes = size.floor()
    codes += size - codes >= 0.5
    return codes.copysign_(x).to(torch.int8).view(weight.shape), scales.squeeze(2).to(torch.float16)


def from_blocks(blocks: Tensor) -> Encoded:
    """blocks uint8 [O, I / 32 * 34], as ggml's files hold them: of each group its scale, then its codes."""
    groups = blocks.contiguous().view(len(blocks), -1, 2 + GROUP)
    scales = groups[..., :2].contiguous().view(torch.float16).squeeze(2)
    return signed(groups[..., 2:].contiguous().view(torch.int8).view(len(blocks), -1), scales)


def to_blocks(encoded: Encoded) -> Tensor:
    """The reverse: uint8 [O, I / 32 * 34]."""
    scales, codes = encoded.scales.contiguous().unsqueeze(2).view(torch.uint8), encoded.codes.view(torch.uint8)
    return torch.cat((scales, codes.unflatten(1, (-1, GROUP))), 2).flatten(1)


def signed(codes: Tensor, scales: Tensor) -> Encoded:
    """codes int8 [O, I] above -128 and scales f16 [O, I / 32], of any sign: kernels for CPUs know none below 0."""
    below = scales.signbit()
    if not below.any():
        return Encoded(codes, scales)
    signs = torch.where(below, -1, 1).to(torch.int8).repeat_interleave(GROUP, 1)
    return Encoded(codes * signs, scales.abs())


def kept_bits(inputs: int, device: torch.device) -> float:
    """What `pack` keeps of a weight with its share of the scale."""
    return BITS


def pack(codes: Tensor, scales: Tensor) -> Packed:
    """What `linear` likes best on the device that reads it (target.py)."""
    if target.of(codes) == "cuda":
        return q8_0_cuda.pack(codes, scales)
    return q8_0_cpu.pack(codes, scales) if q8_0_cpu.takes(codes) else Encoded(codes, scales)


def dequantize(packed: Packed, dtype: torch.dtype = torch.float32, first: int = 0, last: int | None = None) -> Tensor:
    """Outputs first to last of the weight, [last - first, I]: exact in f32, rounded once in 16 bits.

    first: a multiple of 16.
    """
    last = packed.outputs if last is None else min(last, packed.outputs)
    if isinstance(packed, q8_0_cpu.Packed):
        return blocks_cpu.dequantize(packed.of_blocks, dtype, first, last)
    if isinstance(packed, pieces_cuda.Packed):
        part = packed.part(first, last)
        if dtype != torch.float32:
            return dequantize_pieces.dequantize(part, dtype)
        codes, scales = q8_0_cuda.unpack(part)
    else:
        codes, scales = packed.codes[first:last], packed.scales[first:last]
    groups = codes.view(*scales.shape, GROUP).float() * scales.float().unsqueeze(2)
    return groups.view(codes.shape).to(dtype)


linear = functools.partial(panels.linear, dequantize)
variants = pieces_cuda.variants  # what `linear` is compiled as on a GPU
