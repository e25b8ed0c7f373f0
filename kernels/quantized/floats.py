"""Weights in floating point of 8 or 4 bits, whose neighbours along the inputs share a scale: FP8 and MXFP4.

e4m3: Micikevicius et al. 2022, arXiv 2209.05433. e2m1 with scales e8m0: OCP Microscaling Formats v1.0, MXFP4.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import cuda_layouts, e4m3_cpu, packed_gemm, target


class Floats(NamedTuple):
    """A weight [O, I], or one of each expert [E, O, I]: element o, i is codes[o, i] * scales[o, i // (I / G)]."""

    codes: Tensor  # uint8 [..., O, I] of e4m3; or [..., O, I / 2] of e2m1, the first of two inputs in the lower bits
    scales: Tensor  # [..., O, G] f32; or uint8, of e8m0: 2^(x - 127)

    @property
    def pairs(self) -> bool:
        """Whether codes are e2m1."""
        return self.scales.dtype == torch.uint8

    @property
    def inputs(self) -> int:
        return self.codes.shape[-1] * (2 if self.pairs else 1)

    @property
    def outputs(self) -> int:
        return self.codes.shape[-2]

    @property
    def unit(self) -> int:
        """Inputs of a scale."""
        return self.inputs // max(self.scales.shape[-1], 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape."""
        return (*self.codes.shape[:-1], self.inputs)

    def dequantize(self, dtype: torch.dtype, first: int, last: int) -> Tensor:
        """Outputs first to last of the weight, [..., last - first, I]."""
        codes, scales = self.codes[..., first:last, :], self.scales[..., first:last, :]
        if self.pairs:
            values = cuda_layouts.e2m1(codes.device)[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()]
            by = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)
        else:
            values, by = codes.view(torch.float8_e4m3fn).to(torch.float32), scales
        if not values.numel():
            return values.to(dtype)
        return (values.unflatten(-1, (-1, self.unit)) * by.unsqueeze(-1)).flatten(-2).to(dtype)

    def expert(self, index: int) -> Floats:
        return Floats(self.codes[index], self.scales[index])

    def plain(self, dtype: torch.dtype) -> Tensor:
        """All weights [E, O, I]."""
        y = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        for index, one in enumerate(y):
            one.copy_(self.expert(index).dequantize(dtype, 0, self.outputs))
        return y


Packed = Floats | packed_gemm.Packed | e4m3_cpu.Packed


def pack(codes: Tensor, scales: Tensor) -> Floats:
    """codes: uint8 or e4m3."""
    return Floats(codes.view(torch.uint8).contiguous(), scales.contiguous())


def pack_for_device(plain: Floats, weight_only: bool = False) -> Packed:
    """A weight [O, I] of e4m3 as GEMMs on its device like it best. weight_only: activations keep their 16 bits."""
    packed = e4m3_cpu.pack(plain.codes, plain.scales) if e4m3_cpu.takes(plain.codes, plain.unit) else None
    if packed is not None:
        return packed
    if target.of(plain.codes) != "cuda" or not in_packed_tiles(plain.inputs, plain.unit) or not plain.codes.numel():
        return plain
    return pack_for_gpus(plain, weight_only)


def pack_for_gpus(plain: Floats, weight_only: bool = False) -> packed_gemm.Packed:
    """Packs for GPUs, on any device, if they take it (`in_packed_tiles`)."""
    if cuda_layouts.takes_wide(plain.inputs, plain.unit):
        return cuda_layouts.pack_wide(plain.codes, plain.scales, weight_only)
    scales = plain.scales.repeat_interleave(plain.unit // cuda_layouts.E4M3.inputs, 1)
    return cuda_layouts.pack(cuda_layouts.E4M3, plain.codes, scales=scales)


def in_packed_tiles(inputs: int, unit: int) -> bool:
    """Whether GPUs have weights of so many inputs, of which `unit` share a scale, in packed tiles."""
    return inputs % cuda_layouts.E4M3.inputs == unit % cuda_layouts.E4M3.inputs == 0


def kept_bits(inputs: int, unit: int, device: torch.device) -> float:
    """Bits that `pack_for_device` keeps of a weight with its share of its scale; 0: GPUs have no kernels for it."""
    if device.type != "cuda":
        return 8 + 32 / unit
    if not in_packed_tiles(inputs, unit):
        return 0
    return (cuda_layouts.E4M3_WIDE if cuda_layouts.takes_wide(inputs, unit) else cuda_layouts.E4M3).bits
