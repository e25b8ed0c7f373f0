"""Q8_0, a format of ggml's (gguf-py's quants.py): 32 weights along the inputs share an f16 scale, each is an int8.

A weight is its code times its group's scale: 8.5 bits. Steps of few rows read codes and scales as they lie. Of more
rows, dequantising a panel of the weight first and multiplying with the library is faster.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..activation.activation import gated_activation
from ..gemm import linear as gemm
from . import q8_0_cpu
from .q8_0_cpu import GROUP

BITS = 8.5  # of a weight with its share of the scale
CHUNK = 1 << 22  # elements that are encoded at once: what that takes is small beside a matrix
PANEL = {"cpu": 1 << 20, "cuda": 1 << 26}  # elements that are dequantised at once


class Packed(NamedTuple):
    """A weight [O, I] as `encode` makes it."""

    codes: Tensor  # int8 [O, I]
    scales: Tensor  # f16 [O, I / 32]


def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [O, I] of any float dtype → codes int8 [O, I] and scales f16 [O, I / 32], as gguf-py's, bit for bit.

    A group's scale is max|w| / 127, and codes are rounded half away from zero, before the scale is rounded to f16.
    """
    outputs, inputs = weight.shape
    codes = weight.new_empty(outputs, inputs, dtype=torch.int8)
    scales = weight.new_empty(outputs, inputs // GROUP, dtype=torch.float16)
    rows = max(1, CHUNK // max(inputs, 1))
    for first in range(0, outputs, rows):
        part = slice(first, first + rows)
        codes[part], scales[part] = _encode_rows(weight[part])
    return codes, scales


def _encode_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    return q8_0_cpu.encode(weight) if q8_0_cpu.takes(weight, weight.dtype) else encode_reference(weight)


def encode_reference(weight: Tensor) -> tuple[Tensor, Tensor]:
    groups = weight.float().view(len(weight), -1, GROUP)
    # Divided by a tensor: by a Python number, GPUs multiply with the reciprocal, which rounds differently.
    scales = groups.abs().amax(2, keepdim=True) / torch.full((), 127.0, device=weight.device)
    x = groups * torch.where(scales == 0, 0, 1 / scales)
    size = x.abs()
    codes = size.floor()
    codes += size - codes >= 0.5
    return codes.copysign_(x).to(torch.int8).view(weight.shape), scales.squeeze(2).to(torch.float16)


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight [O, I]: exact in f32, rounded once in 16 bits."""
    if q8_0_cpu.takes(codes, dtype):
        return q8_0_cpu.dequantize(codes, scales, dtype)
    return dequantize_reference(codes, scales, dtype)


def dequantize_reference(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    groups = codes.view(*scales.shape, GROUP).float() * scales.float().unsqueeze(2)
    return groups.view(codes.shape).to(dtype)


def pack(codes: Tensor, scales: Tensor) -> Packed:
    """What `linear` likes best on their device."""
    return Packed(codes, scales)


def linear(x: Tensor, packed: Packed, gate: str = "", bias: Tensor | None = None) -> Tensor:
    """x [T, I] times the transpose of the weight [O, I], plus bias [O]: [T, O], contiguous.

    gate: an activation; then the weight is gate over up, and act(gate) * up [T, O / 2] is returned.
    """
    if q8_0_cpu.supports(x, packed.codes):
        y = q8_0_cpu.linear(x, packed.codes, packed.scales, bias)
    else:
        y = by_panels(x, packed, bias)
    return gated_activation(y, gate) if gate else y


def by_panels(x: Tensor, packed: Packed, bias: Tensor | None = None) -> Tensor:
    """[T, O] of dequantised panels of the weight, with the library's GEMM."""
    outputs, inputs = packed.codes.shape
    each = max(1, PANEL[x.device.type] // inputs)
    if outputs <= each:
        return gemm.linear(x, dequantize(*packed, x.dtype), bias)
    y = x.new_empty(len(x), outputs)
    for first in range(0, outputs, each):
        part = slice(first, first + each)
        panel = dequantize(packed.codes[part], packed.scales[part], x.dtype)
        torch.mm(x, panel.t(), out=y[:, part])
    return y if bias is None else y.add_(bias)
