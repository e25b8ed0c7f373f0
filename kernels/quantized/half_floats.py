"""Weights of bf16 or f16 under activations of f32, on CPUs.

A step for small M reads half of what the same weights take in f32, and adds up the same products: they are widened in
registers. More rows are multiplied by the library, with panels that are widened.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import jit
from ..activation.activation import gated_activation
from ..device import DeviceCaps
from ..gemm import cpu_gemm
from . import panels


class Packed(NamedTuple):
    """A weight [O, I]."""

    weight: Tensor

    @property
    def outputs(self) -> int:
        return len(self.weight)

    def dequantize(self, dtype: torch.dtype, first: int, last: int) -> Tensor:
        """Outputs first to last, [last - first, I]."""
        return self.weight[first:last].to(dtype)


def pack(weight: Tensor) -> Packed:
    """weight: [O, I] of 16 bits."""
    return Packed(weight)


FORM, FORMS, dequantize = None, (pack,), panels.dequantize


def linear(x: Tensor, packed: Packed, gate: str = "", bias: Tensor | None = None) -> Tensor:
    """x [T, I] in f32 times the transpose of the weight, plus bias [O]: [T, O]. gate: an activation; then the weight is
    gate over up, and act(gate) * up [T, O / 2] is returned."""
    weight = packed.weight
    if not cpu_gemm.supports(x, weight):
        return panels.multiply(x, len(weight), packed.dequantize, gate, bias)
    y = cpu_gemm.cpu_linear(x, weight, bias=bias)
    return gated_activation(y, gate) if gate else y


def variants(
    rows: Sequence[int], packed: Packed, dtype: torch.dtype, gate: str, bias: bool, caps: DeviceCaps
) -> Iterator[jit.KernelVariant]:
    """There are none for GPUs."""
    yield from ()
