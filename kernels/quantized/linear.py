"""Linears of packed weights: by kernels that read them as they lie, or by panels that are dequantised for the library.

A packed weight [O, I] is a named tuple with `outputs` and `dequantize`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..activation.activation import gated_activation
from ..candidate import Candidate, choose
from ..gemm import cpu_gemm
from ..gemm import linear as gemm
from . import blocks_cpu, e4m3_cpu, packed_gemm

PANEL = {"cpu": 1 << 20, "cuda": 1 << 27, "mps": 1 << 27}  # elements that are dequantised at once


class Halves(NamedTuple):
    """A weight [O, I] in 16 bits under activations of any dtype. CPUs widen it in registers under f32: a step for small
    M reads half of what it takes in f32, and adds up the same products."""

    weight: Tensor

    @property
    def outputs(self) -> int:
        return len(self.weight)

    def dequantize(self, dtype: torch.dtype, first: int, last: int) -> Tensor:
        return self.weight[first:last].to(dtype)


def dequantize(packed: Any, dtype: torch.dtype = torch.float32, first: int = 0, last: int | None = None) -> Tensor:
    """Outputs first to last of a packed weight, [last - first, I]: computed in f32, rounded once in 16 bits.

    first: a multiple of 16.
    """
    last = packed.outputs if last is None else min(last, packed.outputs)
    made: Tensor = packed.dequantize(dtype, first, last)
    return made


def linear(x: Tensor, packed: Any, gate: str = "", bias: Tensor | None = None) -> Tensor:
    """x [T, I] times the transpose of the weight [O, I], plus bias [O]: [T, O], contiguous.

    gate: an activation; then the weight is gate over up, and act(gate) * up [T, O / 2] is returned.
    """
    found = choose(CANDIDATES, x, packed, gate, bias)
    assert found is not None, "the last one takes all"
    return found.run(x, packed, gate, bias)


def _by_panels(x: Tensor, packed: Any, gate: str, bias: Tensor | None) -> Tensor:
    outputs, inputs = packed.outputs, x.shape[1]
    if outputs * inputs <= PANEL[x.device.type]:
        return gemm.gated_linear(x, packed.dequantize(x.dtype, 0, outputs), gate, bias)
    each = max(16, PANEL[x.device.type] // inputs // 16 * 16)
    y = x.new_empty(len(x), outputs)
    for first in range(0, outputs, each):
        panel = packed.dequantize(x.dtype, first, min(first + each, outputs))
        torch.mm(x, panel.t(), out=y[:, first : first + each])
    if bias is not None:
        y += bias
    return gated_activation(y, gate) if gate else y


CANDIDATES = (
    Candidate("packed_gemm.py", "GPUs", "packed tiles, by the kernels below", packed_gemm.supports, packed_gemm.linear),
    blocks_cpu.CANDIDATE,
    e4m3_cpu.CANDIDATE,
    Candidate(
        "cpu_gemm.cpp", "CPUs", f"up to {cpu_gemm.MAX_ROWS} rows of f32 or bf16, weights of 16 bits",
        lambda x, packed, gate, bias: isinstance(packed, Halves) and cpu_gemm.supports(x, packed.weight),
        lambda x, packed, gate, bias: cpu_gemm.cpu_linear(x, packed.weight, gate, bias),
    ),
    Candidate(
        "linear.py", "all", "all else, dequantised panel by panel for a GEMM of plain weights", lambda *_: True,
        _by_panels,
    ),
)  # fmt: skip
