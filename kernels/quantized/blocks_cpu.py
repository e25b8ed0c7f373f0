"""Weights of quantised codes in blocks of 16 outputs on CPUs: kernels/cpp/blocks.h.

Few rows are multiplied with the codes as they lie; the weight is never in memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..activation.activation import gated_activation
from ..cpp import ops
from ..cpp.scratch import Scratch
from . import int8_planes_cpu, target
from .cpu_layouts import Packed

MAX_ROWS = 64  # at once: their int8 planes stay in the cache


class Gated(NamedTuple):
    """Builds rows x [P, I] of experts: act(both's first half) * its second half."""

    act: str
    both: Tensor  # [P, 2 I], contiguous, as x is then


def takes(x: Tensor) -> bool:
    """Whether operations will read what is packed of x [O, I], weights or codes. `target` has the device on which that
    is. x itself may still lie on a GPU: `ops.takes` tests whether operations may read it now."""
    return target.of(x) == "cpu" and x.is_contiguous() and x.numel() > 0 and ops.available()


def supports(x: Tensor) -> bool:
    """x [T, I]; whether operations take it, and are faster than a GEMM of the dequantised weight."""
    return x.dtype in ops.SUFFIXES and x.stride(1) == 1 and 0 < len(x) <= int8_planes_cpu.max_rows(x.dtype)


def linear(x: Tensor, of: Packed, gate: str = "", bias: Tensor | None = None) -> Tensor:
    """[T, O], or gated [T, O / 2], where it supports; sums are f32."""
    y, scratch = x.new_empty(len(x), of.outputs), Scratch(len(x))
    multiply = ops.typed(of.layout.source, f"{of.layout.name}_linear", x.dtype)
    calls: list[tuple[ops.Op, tuple[ops.Value, ...]]] = []
    for some, made in zip(x.split(MAX_ROWS), y.split(MAX_ROWS), strict=True):
        planes = int8_planes_cpu.empty(some, scratch)
        sizes = len(some), of.inputs, of.outputs, x.stride(0), of.layout.inputs, of.layout.zero
        calls += int8_planes_cpu.split(some, planes), (multiply, (some, planes, of.blocks, bias, made, *sizes))
    ops.run(*calls)
    return gated_activation(y, gate) if gate else y


def experts(
    x: Tensor, of: Packed, sizes: tuple[int, int], offsets: Tensor, bias: Tensor | None, y: Tensor,
    scratch: Scratch, at: Tensor | None = None, gated: Gated | None = None,
) -> ops.Calls:  # fmt: skip
    """Operations that make y [P, O] of x [P, I], whose rows are sorted by expert. of: the weights [O, I] of all
    experts, each filled up to whole blocks. sizes: experts, O. ends int32 [experts + 1]: where each one's rows begin.
    bias [experts, O]. at int64 [experts]: which of the stack's weights is each one's, where it is not its own number.
    gated: what x is made of first."""
    (count, outputs), planes = sizes, int8_planes_cpu.empty(x, scratch)
    if gated is None:
        split = int8_planes_cpu.split(x, planes, offsets, count)
    else:
        split = int8_planes_cpu.split_gated(*gated, x, planes, offsets, count)
    dims = count, of.inputs, outputs, x.stride(0), of.layout.inputs, of.layout.zero
    multiply = ops.typed(of.layout.source, f"{of.layout.name}_experts", x.dtype)
    return split, (multiply, (x, planes, of.blocks, bias, offsets, at, scratch.taken, y, *dims))


def rows(ids: Tensor, of: Packed, start: int, scale: float, dtype: torch.dtype) -> Tensor:
    """Output ids[t] - start for each t, times scale in f32: [T, I]. An id outside the weight gives zeros."""
    made = dtype if dtype in ops.SUFFIXES else torch.float32
    y = of.blocks.new_empty(len(ids), of.inputs, dtype=made)
    sizes = len(ids), of.inputs, of.outputs, of.layout.inputs, of.layout.zero, start
    ops.typed(of.layout.source, f"{of.layout.name}_rows", made)(ids.contiguous(), of.blocks, y, *sizes, float(scale))
    return y.to(dtype)
