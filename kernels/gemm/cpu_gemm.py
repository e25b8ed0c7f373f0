"""GEMMs of a few rows on CPUs, of weights as they lie: cpu_gemm.cpp.

A step of small M reads all weights once, and a core reads them as fast as the memory gives them. Of more rows the
library is as fast or faster.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..activation.activation import gated_activation
from ..candidate import Candidate
from ..cpp import ops

MAX_ROWS = 64


def supports(x: Tensor, weight: Tensor, gate: str = "", bias: Tensor | None = None) -> bool:
    """x [T, I], weight [O, I]: of x's dtype, or of 16 bits where x is f32."""
    if x.device.type != "cpu" or not 0 < len(x) <= MAX_ROWS or x.dtype not in (weight.dtype, torch.float32):
        return False
    return x.stride(1) == 1 and ops.takes(x) and ops.reads(weight)


def cpu_linear(x: Tensor, weight: Tensor, gate: str = "", bias: Tensor | None = None) -> Tensor:
    """[T, O], where it supports. bias: of x's dtype."""
    y = x.new_empty(len(x), len(weight))
    inputs = weight.shape[1]
    name = "linear" if x.dtype == weight.dtype else "linear_f32_of"
    ops.typed("cpu_gemm", name, weight.dtype)(x, weight, bias, y, len(x), inputs, len(weight), x.stride(0))
    return gated_activation(y, gate) if gate else y


CANDIDATE = Candidate(
    "cpu_gemm.cpp", "CPUs", f"up to {MAX_ROWS} rows of f32 or bf16, weights of the same or of 16 bits", supports,
    cpu_linear,
)  # fmt: skip
