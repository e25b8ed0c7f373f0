"""Weights in floating point of 8 or 4 bits, whose neighbours along the inputs share a scale: FP8 and MXFP4.

e4m3: Micikevicius et al. 2022, arXiv 2209.05433. e2m1 with scales e8m0: OCP Microscaling Formats v1.0, MXFP4.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import jit
from ..activation.activation import gated_activation
from ..device import DeviceCaps
from . import dequantize_pieces, e4m3_cpu, e4m3_cuda, e4m3_rows, e4m3_wgmma, e4m3_wide, panels, pieces_cuda, target

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


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
        """As the weight's."""
        return (*self.codes.shape[:-1], self.inputs)

    def expert(self, index: int) -> Floats:
        return Floats(self.codes[index], self.scales[index])


Packed = Floats | pieces_cuda.Packed | e4m3_cpu.Packed


def pack(codes: Tensor, scales: Tensor) -> Floats:
    """codes: uint8 or e4m3."""
    return Floats(codes.view(torch.uint8).contiguous(), scales.contiguous())


def pack_for_device(plain: Floats) -> Packed:
    """A weight [O, I] of e4m3 as GEMMs on its device like it best."""
    if e4m3_cpu.takes(plain.codes, plain.unit):
        return e4m3_cpu.pack(plain.codes, plain.scales)
    if target.of(plain.codes) != "cuda" or not in_pieces(plain.inputs, plain.unit) or not plain.codes.numel():
        return plain
    if e4m3_wide.takes(plain.inputs, plain.unit):
        return e4m3_wide.pack(plain.codes, plain.scales)
    return e4m3_cuda.pack(plain.codes, plain.scales.repeat_interleave(plain.unit // e4m3_cuda.GROUP, 1))


def in_pieces(inputs: int, unit: int) -> bool:
    """Whether GPUs have weights of so many inputs, of which `unit` share a scale, in pieces."""
    return inputs % e4m3_cuda.GROUP == 0 and unit % e4m3_cuda.GROUP == 0


def kept_bits(inputs: int, unit: int, device: torch.device) -> float:
    """What `pack_for_device` keeps of a weight with its share of its scale."""
    if device.type == "cuda" and in_pieces(inputs, unit):
        form = e4m3_wide if e4m3_wide.takes(inputs, unit) else e4m3_cuda
        return form.PIECE * 8 / (16 * form.GROUP)
    return 8 + 32 / unit


def dequantize(packed: Packed, dtype: torch.dtype = torch.float32, first: int = 0, last: int | None = None) -> Tensor:
    """Outputs first to last of the weight, [..., last - first, I]: computed in f32, rounded once in 16 bits.

    first: a multiple of 16.
    """
    last = packed.outputs if last is None else min(last, packed.outputs)
    if isinstance(packed, e4m3_cpu.Packed):
        return e4m3_cpu.dequantize(packed, dtype, first, last)
    if isinstance(packed, pieces_cuda.Packed):
        part = packed.part(first, last)
        if dtype != torch.float32:
            return dequantize_pieces.dequantize(part, dtype)
        form = e4m3_wide if part.layout.header == e4m3_wide.LAYOUT.header else e4m3_cuda
        packed, first, last = Floats(*form.unpack(part)), 0, last - first
    if packed.codes.is_cuda and packed.codes.dim() == 2:
        from . import floats_triton

        return floats_triton.dequantize(Floats(packed.codes[first:last], packed.scales[first:last]), dtype)
    return dequantize_reference(packed, dtype, first, last)


@functools.cache
def _e2m1(device: torch.device) -> Tensor:
    """Kept: a captured step must not copy it from the host."""
    return torch.tensor(E2M1, device=device)


def dequantize_reference(packed: Floats, dtype: torch.dtype, first: int, last: int) -> Tensor:
    codes, scales = packed.codes[..., first:last, :], packed.scales[..., first:last, :]
    if packed.pairs:
        values = _e2m1(codes.device)[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()]
        by = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)
    else:
        values, by = codes.view(torch.float8_e4m3fn).to(torch.float32), scales
    if not values.numel():
        return values.to(dtype)
    return (values.unflatten(-1, (-1, packed.unit)) * by.unsqueeze(-1)).flatten(-2).to(dtype)


def linear(x: Tensor, packed: Packed, gate: str = "", bias: Tensor | None = None) -> Tensor:
    """x [T, I] times the transpose of the weight [O, I], plus bias [O]: [T, O], contiguous.

    gate: an activation; then the weight is gate over up, and act(gate) * up [T, O / 2] is returned.
    """
    if isinstance(packed, pieces_cuda.Packed):
        if e4m3_wgmma.supports(x, packed, bias):
            return e4m3_wgmma.linear(e4m3_rows.encode(x), packed, gate, bias)
        if pieces_cuda.supports(x, packed, bias):
            return pieces_cuda.linear(x, packed, gate, bias)
    elif isinstance(packed, e4m3_cpu.Packed):
        if e4m3_cpu.supports(x):
            y = e4m3_cpu.linear(x, packed, bias)
            return gated_activation(y, gate) if gate else y
    elif x.is_cuda:
        from . import floats_triton

        if floats_triton.supports(x, packed, bias):
            y = floats_triton.linear(x, packed, bias)
            return gated_activation(y, gate) if gate else y
    return panels.multiply(x, packed.outputs, functools.partial(dequantize, packed), gate, bias)


def variants(
    rows: Iterable[int], packed: object, dtype: torch.dtype, gate: str, bias: bool, found: DeviceCaps
) -> Iterator[jit.KernelVariant]:
    """What `linear` of so many rows, each, is compiled as on a GPU, but for Triton's."""
    every = set(rows)
    eight = {n for n in every if e4m3_wgmma.chosen(n, packed, found)}
    yield from e4m3_wgmma.variants(eight, packed, dtype, gate, bias, found)
    yield from pieces_cuda.variants(every - eight, packed, dtype, gate, bias, found)
