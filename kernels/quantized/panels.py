"""Quantised weights by kernels, or by panels that are dequantised for the library, where none multiplies them as they
lie."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ..activation.activation import gated_activation
from ..gemm import linear as gemm
from . import blocks_cpu, cpu_layouts, packed_gemm

PANEL = {"cpu": 1 << 20, "cuda": 1 << 27, "mps": 1 << 27}  # elements that are dequantised at once


class Dequantize(Protocol):
    def __call__(self, dtype: torch.dtype, first: int, last: int) -> Tensor:
        """Outputs first to last of a weight, [last - first, I]; first is a multiple of 16."""


def dequantize(packed: Any, dtype: torch.dtype = torch.float32, first: int = 0, last: int | None = None) -> Tensor:
    """Outputs first to last of a packed weight, [last - first, I]: computed in f32, rounded once in 16 bits.

    first: a multiple of 16.
    """
    last = packed.outputs if last is None else min(last, packed.outputs)
    made: Tensor = packed.dequantize(dtype, first, last)
    return made


def linear(x: Tensor, packed: Any, gate: str = "", bias: Tensor | None = None) -> Tensor:
    """x [T, I] times the transpose of the weight [O, I], plus bias [O]: [T, O], contiguous. By kernels where they read
    what is packed: in tiles for GPUs, in blocks for CPUs.

    gate: an activation; then the weight is gate over up, and act(gate) * up [T, O / 2] is returned.
    """
    if isinstance(packed, packed_gemm.Packed) and packed_gemm.supports(x, packed, bias):
        return packed_gemm.linear(x, packed, gate, bias)
    if isinstance(packed, cpu_layouts.Packed) and blocks_cpu.supports(x):
        return blocks_cpu.linear(x, packed, gate, bias)
    return multiply(x, packed.outputs, packed.dequantize, gate, bias)


def multiply(x: Tensor, outputs: int, dequantize: Dequantize, gate: str = "", bias: Tensor | None = None) -> Tensor:
    """x [T, I] times the transpose of a weight [outputs, I], plus bias: [T, outputs], contiguous; gated or not."""
    if outputs * x.shape[1] <= PANEL[x.device.type]:
        weight = dequantize(x.dtype, 0, outputs)
        return gemm.gated_linear(x, weight, gate, bias)
    each = max(16, PANEL[x.device.type] // x.shape[1] // 16 * 16)
    y = x.new_empty(len(x), outputs)
    for first in range(0, outputs, each):
        panel = dequantize(x.dtype, first, min(first + each, outputs))
        torch.mm(x, panel.t(), out=y[:, first : first + each])
    if bias is not None:
        y += bias
    return gated_activation(y, gate) if gate else y
