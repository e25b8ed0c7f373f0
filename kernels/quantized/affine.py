"""Weights in groups of neighbouring inputs, each with a scale and a zero point: (code - zero) * scale.

GPTQ, AWQ and compressed-tensors store that, in codes of 4 or 8 bits. 4 bits are kept as they are (int4_cuda.py,
int4_cpu.py). Elsewhere a code less its zero is a number of 8 bits, unless 8-bit codes have zeros far from their middle:
then q8_0's kernels take them. Scales are f16; weights whose scales f16 does not hold are dequantised by panels.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..cpp import ops
from . import blocks_cpu, dequantize_pieces, int4_cpu, int4_cuda, panels, pieces_cuda, q8_0, target
from .q8_0_cpu import GROUP as UNIT  # inputs that a group has a multiple of

TINY = 2.0**-25  # by which a scale may be rounded: f16's, of numbers below 2^-14


class Affine(NamedTuple):
    """A weight [O, I]. Groups have I / G inputs."""

    codes: Tensor  # uint8 [O, I]
    scales: Tensor  # f32 [O, G]
    zeros: Tensor  # int16 [O, G]

    @property
    def outputs(self) -> int:
        return len(self.codes)


Packed = Affine | int4_cpu.Packed | q8_0.Packed


def pack(codes: Tensor, scales: Tensor, zeros: Tensor, stored_zeros: bool = False) -> Packed:
    """What `linear` likes best on the device that reads it. stored_zeros: where all are in the middle, too."""
    (outputs, inputs), groups = codes.shape, scales.shape[1]
    if not codes.numel() or ((scales - scales.to(torch.float16).float()).abs() > TINY).any():
        return Affine(codes, scales, zeros)
    few = codes.max() < 16 and zeros.min() >= 0 and zeros.max() <= int4_cuda.MOST_ZERO
    if few and inputs % int4_cuda.INPUTS == 0:  # on CPUs as well: what is in host memory may go to a GPU
        if target.of(codes) == "cuda":
            return int4_cuda.pack(codes, scales, zeros, stored_zeros)
        if blocks_cpu.takes(codes.contiguous()):
            return int4_cpu.pack(codes, scales, zeros, stored_zeros)
    signs = torch.where(scales < 0, -1, 1).to(torch.int16)  # q8_0's scales have none
    ends = torch.stack([(end - zeros) * signs for end in codes.view(outputs, groups, -1).aminmax(dim=2)])
    if ends.min() < -128 or ends.max() > 127:
        return Affine(codes, scales, zeros)
    signed = (codes.view(outputs, groups, -1) - zeros.unsqueeze(2)) * signs.unsqueeze(2)
    by = scales.abs().to(torch.float16).repeat_interleave(inputs // groups // UNIT, 1)
    return q8_0.pack(signed.to(torch.int8).view(outputs, inputs), by)


# Of a stack's weights: what `pack` makes of one, not all may fit.
FORMS = (pack, functools.partial(pack, stored_zeros=True), Affine)


def kept_bits(bits: int, group: int, inputs: int, symmetric: bool, device: torch.device) -> float:
    """What `pack` keeps of a weight with its share of its group's scale, as far as the sizes tell."""
    if bits == 8 and not symmetric:  # zeros far from the middle, in practice: codes, scales and zeros as they are
        return 8 + 8 * (torch.float32.itemsize + torch.int16.itemsize) / max(group, 1)
    if bits != 4 or inputs % int4_cuda.INPUTS or device.type == "cpu" and not ops.available():
        return q8_0.BITS
    if device.type != "cuda":
        return int4_cpu.kept_bits(group, not symmetric)
    form = int4_cuda.layout(int4_cuda.INPUTS if group % int4_cuda.INPUTS == 0 else UNIT, not symmetric)
    return form.bytes / (2 * form.inputs)  # of sixteen outputs


def dequantize(packed: Packed, dtype: torch.dtype = torch.float32, first: int = 0, last: int | None = None) -> Tensor:
    """Outputs first to last of the weight, [last - first, I]: computed in f32, rounded once in 16 bits.

    first: a multiple of 16.
    """
    last = packed.outputs if last is None else min(last, packed.outputs)
    if isinstance(packed, pieces_cuda.Packed) and packed.layout.header == int4_cuda.HEADER:
        part = packed.part(first, last)
        if dtype != torch.float32:
            return dequantize_pieces.dequantize(part, dtype)
        codes, scales, zeros = int4_cuda.unpack(part)
    elif isinstance(packed, int4_cpu.Packed):
        return blocks_cpu.dequantize(packed.of_blocks, dtype, first, last)
    elif isinstance(packed, Affine):
        codes, scales, zeros = (one[first:last] for one in packed)
    else:
        return q8_0.dequantize(packed, dtype, first, last)
    groups = codes.view(*scales.shape, -1)
    return ((groups - zeros.short().unsqueeze(2)) * scales.float().unsqueeze(2)).view(codes.shape).to(dtype)


linear = functools.partial(panels.linear, dequantize)
variants = pieces_cuda.variants  # what `linear` is compiled as on a GPU
