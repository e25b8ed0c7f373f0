"""Codes of 8 bits with an f16 scale for each 32 inputs: ggml's Q8_0, Q5_0 and IQ4_NL, whose numbers have no more.

A weight is its code times its group's scale: 8.5 bits. Steps for small M read codes and scales as they lie. Of more
rows, dequantising a panel of the weight first and multiplying with the library is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cpp import ops
from . import blocks_cpu, cpu_layouts, cuda_layouts, ggml_encoders, packed_gemm, packing_cpu, target
from .ggml_types import TYPES, Type

GROUP = 32  # inputs with one scale
BITS = 8.5  # of a weight with its share of the scale
CHUNK = 1 << 22  # elements that are encoded at once: what that takes is small beside a matrix


class Encoded(NamedTuple):
    """A weight [O, I] as `encode` makes it: where no kernel wants it in another layout."""

    codes: Tensor  # int8 [O, I]
    scales: Tensor  # f16 [O, I / 32]

    @property
    def outputs(self) -> int:
        return len(self.codes)

    def dequantize(self, dtype: torch.dtype, first: int, last: int) -> Tensor:
        return cuda_layouts.scaled(self.codes[first:last].float(), self.scales[first:last]).to(dtype)


Packed = Encoded | cpu_layouts.Packed | packed_gemm.Packed


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
        codes[part], scales[part] = (encode_in_cpp if compiled else encode_reference)(weight[part])
    return Encoded(codes, scales)


def encode_in_cpp(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight: contiguous, in f32, bf16 or f16."""
    codes = weight.new_empty(weight.shape, dtype=torch.int8)
    scales = weight.new_empty(len(weight), weight.shape[1] // GROUP, dtype=torch.float32)
    ops.typed("q8_0_cpu", "q8_0_encode", weight.dtype)(weight, codes, scales, scales.numel())
    return codes, scales.to(torch.float16)


def encode_reference(weight: Tensor) -> tuple[Tensor, Tensor]:
    groups = weight.float().view(len(weight), -1, GROUP)
    # Divided by a tensor: by a Python number, GPUs multiply with the reciprocal, which rounds differently.
    scales = groups.abs().amax(2, keepdim=True) / torch.full((), 127.0, device=weight.device)
    x = groups * torch.where(scales == 0, 0, 1 / scales)
    size = x.abs()
    codes = size.floor()
    codes += size - codes >= 0.5
    return codes.copysign_(x).to(torch.int8).view(weight.shape), scales.squeeze(2).to(torch.float16)


def signed(codes: Tensor, scales: Tensor) -> Encoded:
    """codes int8 [O, I] above -128 and scales f16 [O, I / 32], of any sign: kernels for CPUs know none below 0."""
    below = scales.signbit()
    if not below.any():
        return Encoded(codes, scales)
    signs = torch.where(below, -1, 1).to(torch.int8).repeat_interleave(GROUP, 1)
    return Encoded(codes * signs, scales.abs())


def pack(codes: Tensor, scales: Tensor) -> Packed:
    """Codes int8 [O, I] and scales f16 [O, I / 32], none below 0."""
    if target.of(codes) == "cuda":
        return cuda_layouts.pack(cuda_layouts.Q8_0, codes, scales=scales)
    if not blocks_cpu.takes(codes):
        return Encoded(codes, scales)
    return cpu_layouts.pack(cpu_layouts.Q8_0, codes.view(torch.uint8), scales=scales)


class Int8Codes:
    """The codec of one of ggml's types."""

    GROUP = GROUP

    def __init__(self, type: Type):
        self.type, self.name = type, type.name
        self.FORMS: tuple[Callable[..., Any], ...] = (self.pack,)

    def encode(self, weight: Tensor) -> tuple[Tensor, ...]:
        """weight [O, I] of any float dtype → what gguf-py's blocks of it mean, bit for bit, or these blocks."""
        return encode(weight) if self.name == "q8_0" else (ggml_encoders.encode(self.type, weight),)

    def pack(self, codes: Tensor, scales: Tensor | None = None) -> Packed:
        """Pack `Encoded`, or ggml's blocks uint8 [O, bytes], as `linear` reads it fastest on its device (target.py)."""
        if scales is not None:
            return pack(codes, scales)
        supers = codes.shape[1] // self.type.bytes
        if packing_cpu.takes(codes):
            made = packing_cpu.pack(self.name, codes, supers, cpu_layouts.Q8_0.bytes)
            return cpu_layouts.Packed(made, len(codes), cpu_layouts.Q8_0)
        decoded = self.type.decode(codes.contiguous().view(len(codes), supers, self.type.bytes))
        return pack(*signed((decoded.codes - self.type.form.zero).view(torch.int8), decoded.factors[..., 0]))

    def kept_bits(self, inputs: int, device: torch.device) -> float:
        """Bits of a weight as `pack` keeps it, with its share of the scale."""
        return BITS


CODECS = {name: Int8Codes(type) for name, type in TYPES.items() if type.kept_as_q8_0}
q8_0, q5_0 = CODECS["q8_0"], CODECS["q5_0"]
