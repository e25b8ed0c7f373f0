"""Weights in groups of neighbouring inputs, each with a scale and a zero point: (code - zero) * scale.

That is what GPTQ, AWQ and compressed-tensors store, in codes of 4 or 8 bits. A group's code less its zero is a number
of 8 bits, unless 8-bit codes have zeros far from their middle. So q8_0's kernels compute them exactly, where f16 holds
the scales; others are dequantised by panels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import jit
from ..activation.activation import gated_activation
from ..device import DeviceCaps
from ..gemm import linear as gemm
from . import q8_0
from .q8_0_cpu import GROUP as UNIT  # inputs that a group has a multiple of


class Affine(NamedTuple):
    """A weight [O, I]. Groups have I / G inputs."""

    codes: Tensor  # uint8 [O, I]
    scales: Tensor  # f32 [O, G]
    zeros: Tensor  # int16 [O, G]

    @property
    def outputs(self) -> int:
        return len(self.codes)


Packed = Affine | q8_0.Packed


def pack(codes: Tensor, scales: Tensor, zeros: Tensor) -> Packed:
    """What `linear` likes best on their device."""
    (outputs, inputs), groups = codes.shape, scales.shape[1]
    signs = torch.where(scales < 0, -1, 1).to(torch.int16)  # q8_0's scales have none
    lowest, highest = codes.view(outputs, groups, -1).aminmax(dim=2)
    ends = torch.stack([(end - zeros) * signs for end in (lowest, highest)])
    exact = torch.equal(scales.to(torch.float16).float(), scales)
    if not exact or (ends.numel() and (ends.min() < -128 or ends.max() > 127)):
        return Affine(codes, scales, zeros)
    signed = (codes.view(outputs, groups, -1) - zeros.unsqueeze(2)) * signs.unsqueeze(2)
    by = scales.abs().to(torch.float16).repeat_interleave(inputs // groups // UNIT, 1)
    return q8_0.pack(signed.to(torch.int8).view(outputs, inputs), by)


def dequantize(packed: Packed, dtype: torch.dtype = torch.float32, first: int = 0, last: int | None = None) -> Tensor:
    """Outputs first to last of the weight, [last - first, I]: computed in f32, rounded once in 16 bits.

    first: a multiple of 16.
    """
    if not isinstance(packed, Affine):
        return q8_0.dequantize(packed, dtype, first, last)
    codes, scales, zeros = (one[first:last] for one in packed)
    groups = codes.view(*scales.shape, -1)
    return ((groups - zeros.unsqueeze(2)) * scales.unsqueeze(2)).view(codes.shape).to(dtype)


def linear(x: Tensor, packed: Packed, gate: str = "", bias: Tensor | None = None) -> Tensor:
    """x [T, I] times the transpose of the weight [O, I], plus bias [O]: [T, O], contiguous.

    gate: an activation; then the weight is gate over up, and act(gate) * up [T, O / 2] is returned.
    """
    if not isinstance(packed, Affine):
        return q8_0.linear(x, packed, gate, bias)
    each = max(16, q8_0.PANEL[x.device.type] // x.shape[1] // 16 * 16)
    panels = (dequantize(packed, x.dtype, first, first + each) for first in range(0, packed.outputs, each))
    y = torch.cat([gemm.linear(x, panel) for panel in panels], 1)
    if bias is not None:
        y += bias
    return gated_activation(y, gate) if gate else y


def variants(
    rows: Iterable[int], packed: Packed, dtype: torch.dtype, gate: str, bias: bool, found: DeviceCaps
) -> Iterator[jit.KernelVariant]:
    """What `linear` of so many rows, each, is compiled as on this GPU."""
    if not isinstance(packed, Affine):
        yield from q8_0.variants(rows, packed, dtype, gate, bias, found)
