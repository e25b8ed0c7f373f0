"""Weights in groups of neighbouring inputs, each with a scale and a zero point: (code - zero) * scale.

GPTQ, AWQ and compressed-tensors store that, in codes of 4 or 8 bits. 4 bits are kept as they are. Elsewhere a code less
its zero is a number of 8 bits (int8_codes.py), unless 8-bit codes have zeros far from their middle. Scales are f16;
weights whose scales f16 does not hold are dequantised by panels.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..cpp import ops
from . import blocks_cpu, cpu_layouts, cuda_layouts, int8_codes, packed_gemm, target

UNIT = int8_codes.GROUP  # inputs that a group has a multiple of
TINY = 2.0**-25  # by which a scale may be rounded: f16's, of numbers below 2^-14


class Affine(NamedTuple):
    """A weight [O, I]. Groups have I / G inputs."""

    codes: Tensor  # uint8 [O, I]
    scales: Tensor  # f32 [O, G]
    zeros: Tensor  # int16 [O, G]

    @property
    def outputs(self) -> int:
        return len(self.codes)

    def dequantize(self, dtype: torch.dtype, first: int, last: int) -> Tensor:
        codes, scales, zeros = (one[first:last] for one in self)
        groups = codes.view(*scales.shape, -1) - zeros.unsqueeze(2)
        return (groups * scales.unsqueeze(2)).view(codes.shape).to(dtype)


Packed = Affine | cpu_layouts.Packed | packed_gemm.Packed | int8_codes.Encoded


def pack(codes: Tensor, scales: Tensor, zeros: Tensor, stored_zeros: bool = False) -> Packed:
    """The packed form that `linear` likes best on the device that reads it. stored_zeros: where all are in the middle,
    too."""
    (outputs, inputs), groups = codes.shape, scales.shape[1]
    if not codes.numel() or ((scales - scales.to(torch.float16).float()).abs() > TINY).any():
        return Affine(codes, scales, zeros)
    few = codes.max() < 16 and zeros.min() >= 0 and zeros.max() <= cuda_layouts.MAX_ZERO
    if few and inputs % cuda_layouts.INT4_INPUTS == 0:  # on CPUs as well: what is in host memory may go to a GPU
        if target.of(codes) == "cuda":
            return cuda_layouts.pack_int4(codes, scales, zeros, stored_zeros)
        if blocks_cpu.takes(codes.contiguous()):
            return cpu_layouts.pack_int4(codes, scales, zeros, stored_zeros)
    by = scales.abs().to(torch.float16).repeat_interleave(inputs // groups // UNIT, 1)
    if not (scales < 0).any() and (zeros == 128).all():  # as symmetric codes of 8 bits have it
        return int8_codes.pack((codes ^ 128).view(torch.int8), by)
    signs = torch.where(scales < 0, -1, 1).to(torch.int16)  # q8_0's scales have none
    groups_of = codes.view(outputs, groups, -1)
    ends = torch.stack([(end - zeros) * signs for end in (groups_of.amin(2), groups_of.amax(2))])
    if ends.min() < -128 or ends.max() > 127:
        return Affine(codes, scales, zeros)
    signed = groups_of.sub(zeros.to(torch.uint8).unsqueeze(2)).view(torch.int8)  # all fit
    if (signs < 0).any():
        signed = signed * signs.to(torch.int8).unsqueeze(2)
    return int8_codes.pack(signed.view(outputs, inputs), by)


# Forms of a stack's weights: what `pack` makes of one, not all may fit.
FORMS = (pack, functools.partial(pack, stored_zeros=True), Affine)


def kept_bits(bits: int, group: int, inputs: int, symmetric: bool, device: torch.device) -> float:
    """Bits that `pack` keeps of a weight with its share of its group's scale, as far as the sizes tell."""
    if bits == 8 and not symmetric:  # zeros far from the middle, in practice: codes, scales and zeros as they are
        return 8 + 8 * (torch.float32.itemsize + torch.int16.itemsize) / max(group, 1)
    if bits != 4 or inputs % cuda_layouts.INT4_INPUTS or device.type == "cpu" and not ops.available():
        return int8_codes.BITS
    if device.type != "cuda":
        return cpu_layouts.int4(group, not symmetric).bits
    of_scale = cuda_layouts.INT4_INPUTS if group % cuda_layouts.INT4_INPUTS == 0 else UNIT
    return cuda_layouts.int4(of_scale, not symmetric).bits
