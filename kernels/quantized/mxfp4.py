"""MXFP4 of experts, in the form that their device reads. It is a codec of stacks (stack.py)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from ..cpp import ops
from . import blocks_cpu, cpu_layouts, cuda_layouts, floats, packed_gemm
from .codec import Codec
from .floats import Floats
from .stack import Stack, padded, stack

BITS = 4.25  # of a weight with its share of its group's scale
AT_ONCE = 1 << 22  # bytes of codes that are packed at once: what that takes is small beside a stack

Packed = cpu_layouts.Packed | packed_gemm.Packed


def experts(
    codes: Tensor,
    scales: Tensor,
    other_inputs: int,
    dtype: torch.dtype,
    in_order: Callable[[Tensor], Tensor] = Tensor.contiguous,
) -> Tensor | Floats | Stack:
    """Weights [E, O, I], packed where kernels of their device multiply them so; else plain on GPUs.

    codes uint8 [E, O, I / 2] and scales uint8 [E, O, I / 32], whose outputs `in_order` brings into the right order.
    other_inputs: of these experts' other matrix. Where one cannot be in packed tiles, neither is: kernels take both or
    none.
    """
    count, outputs, row_bytes = codes.shape
    inputs = 2 * row_bytes
    if not (in_packed_tiles(inputs, other_inputs) if codes.is_cuda else blocks_cpu.takes(codes)):
        made = floats.pack(in_order(codes), in_order(scales))
        return made.plain(dtype) if codes.is_cuda else made
    at_once = max(1, AT_ONCE // (outputs * row_bytes))

    def encoded(index: int) -> list[Tensor]:
        some = slice(index * at_once, (index + 1) * at_once)
        return [in_order(x[some]).flatten(0, 1) for x in (codes, scales)]

    return stack(cast(Codec, sys.modules[__name__]), encoded, (count, outputs, inputs), at_once)


def kept_bits(outputs: int, inputs: int, other_inputs: int, device: torch.device) -> float:
    """Bits that `experts` keeps of a weight with its share of its scale; 0: it becomes plain."""
    if device.type != "cpu" and not in_packed_tiles(inputs, other_inputs):
        return 0
    packed = device.type != "cpu" or ops.available()
    return BITS * (padded(outputs) if packed else outputs) / max(outputs, 1)


def in_packed_tiles(*inputs: int) -> bool:
    """Whether GPUs have so many inputs of both matrices in whole tiles."""
    return all(one > 0 and one % cuda_layouts.INT4_INPUTS == 0 for one in inputs)


def pack(codes: Tensor, scales: Tensor) -> Packed:
    """codes uint8 [O, I / 2], the first of two inputs in the lower bits, and scales uint8 [O, I / 32]."""
    each = torch.stack((codes & 15, codes >> 4), 2).flatten(1)
    if codes.is_cuda:
        return cuda_layouts.pack(cuda_layouts.MXFP4, each, scales=scales)
    return cpu_layouts.pack(cpu_layouts.MXFP4, each, scales=scales)


FORMS = (pack,)
