"""Quantised weights by kernels, or by panels that are dequantised for the library, where none multiplies them as they
lie."""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
from torch import Tensor

from ..activation.activation import gated_activation
from ..gemm import linear as gemm
from . import blocks_cpu, pieces_cuda

PANEL = {"cpu": 1 << 20, "cuda": 1 << 27}  # elements that are dequantised at once


class Dequantize(Protocol):
    def __call__(self, dtype: torch.dtype, first: int, last: int) -> Tensor:
        """Outputs first to last of a weight, [last - first, I]; first is a multiple of 16."""


def linear(dequantize: Any, x: Tensor, packed: Any, gate: str = "", bias: Tensor | None = None) -> Tensor:
    """x [T, I] times the transpose of the weight [O, I], plus bias [O]: [T, O], contiguous. By kernels where they read
    what is packed: in pieces for GPUs, in blocks for CPUs.

    dequantize: of the packed form. gate: an activation; then the weight is gate over up, and act(gate) * up [T, O / 2]
    is returned.
    """
    if isinstance(packed, pieces_cuda.Packed) and pieces_cuda.supports(x, packed, bias):
        return pieces_cuda.linear(x, packed, gate, bias)
    if hasattr(packed, "of_blocks") and blocks_cpu.supports(x):
        return blocks_cpu.linear(x, packed.of_blocks, gate, bias)
    return multiply(x, packed.outputs, functools.partial(dequantize, packed), gate, bias)


def multiply(x: Tensor, outputs: int, dequantize: Dequantize, gate: str = "", bias: Tensor | None = None) -> Tensor:
    """x [T, I] times the transpose of a weight [outputs, I], plus bias: [T, outputs], contiguous; gated or not."""
    if outputs * x.shape[1] <= PANEL[x.device.type]:
        weight = dequantize(x.dtype, 0, outputs)
        return gemm.gated_linear(x, weight, gate, bias) if gate else gemm.linear(x, weight, bias)
    each = max(16, PANEL[x.device.type] // x.shape[1] // 16 * 16)
    y = x.new_empty(len(x), outputs)
    for first in range(0, outputs, each):
        panel = dequantize(x.dtype, first, min(first + each, outputs))
        torch.mm(x, panel.t(), out=y[:, first : first + each])
    if bias is not None:
        y += bias
    return gated_activation(y, gate) if gate else y
