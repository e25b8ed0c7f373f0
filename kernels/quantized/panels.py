"""Products with weights that no kernel multiplies as they lie: panels of the weight are dequantised for the library."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..activation.activation import gated_activation
from ..gemm import linear as gemm

PANEL = {"cpu": 1 << 20, "cuda": 1 << 27}  # elements that are dequantised at once


class Dequantize(Protocol):
    def __call__(self, dtype: torch.dtype, first: int, last: int) -> Tensor:
        """Outputs first to last of a weight, [last - first, I]; first is a multiple of 16."""


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
