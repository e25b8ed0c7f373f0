"""Weights of quantised codes in blocks of 16 outputs on CPUs: kernels/cpp/blocks.h.

Few rows are multiplied with the codes as they lie; the weight is never in memory.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..activation.activation import gated_activation, kind, limit_units
from ..candidate import Candidate
from ..cpp import ops
from ..cpp.scratch import Scratch
from . import target
from .cpu_layouts import RUN, Packed

MAX_ROWS = 64  # at once: their int8 planes stay in the cache
RUN_BYTES = {torch.float32: 124, torch.bfloat16: 92}  # of a run of a row in int8 planes, with its Sums (int8_planes.h)


class Gated(NamedTuple):
    """Builds rows x [P, I] of experts: act(both's first half) * its second half."""

    act: str
    both: Tensor  # [P, 2 I], contiguous, as x is then


def takes(x: Tensor) -> bool:
    """Whether operations will read what is packed of x [O, I], weights or codes. `target` has the device on which that
    is. x itself may still lie on a GPU: `ops.takes` tests whether operations may read it now."""
    return target.of(x) == "cpu" and x.is_contiguous() and x.numel() > 0 and ops.available()


def supports(x: Tensor, packed: object, gate: str = "", bias: Tensor | None = None) -> bool:
    """x [T, I]; whether operations take both, and are faster than a GEMM of the dequantised weight."""
    if not isinstance(packed, Packed) or x.dtype not in ops.SUFFIXES:
        return False
    return x.stride(1) == 1 and 0 < len(x) <= max_rows(x.dtype)


def max_rows(dtype: torch.dtype) -> int:
    """Up to how many rows x of a dtype in int8 planes is faster than a GEMM of the dequantised weight, on this
    processor."""
    return _most_rows(ops.libraries()["int8_planes_cpu"], ops.SUFFIXES[dtype])


@functools.cache
def _most_rows(library: ctypes.CDLL, suffix: str) -> int:
    return ctypes.c_int64.in_dll(library, f"max_rows_{suffix}").value


def _planes(x: Tensor, scratch: Scratch) -> Tensor:
    """Memory for x [T, I] as int8 planes: uint8 [T, bytes]."""
    return scratch.empty(x, (len(x), x.shape[1] // RUN * RUN_BYTES[x.dtype]), torch.uint8)


def _split(x: Tensor, planes: Tensor, offsets: Tensor | None = None, experts: int = 0) -> ops.Call:
    """The operation that makes int8 planes of x [T, I]. offsets int32 [experts + 1]: its first and last bound the rows;
    None: all."""
    return ops.typed("int8_planes_cpu", "split", x.dtype), (x, offsets, planes, *x.shape, x.stride(0), experts)


def linear(x: Tensor, of: Packed, gate: str = "", bias: Tensor | None = None) -> Tensor:
    """[T, O], or gated [T, O / 2], where it supports; sums are f32."""
    y, scratch = x.new_empty(len(x), of.outputs), Scratch(len(x))
    multiply = ops.typed(of.layout.source, f"{of.layout.name}_linear", x.dtype)
    calls: list[ops.Call] = []
    for some, made in zip(x.split(MAX_ROWS), y.split(MAX_ROWS), strict=True):
        planes = _planes(some, scratch)
        sizes = len(some), of.inputs, of.outputs, x.stride(0), of.layout.inputs, of.layout.zero
        calls += _split(some, planes), (multiply, (some, planes, of.blocks, bias, made, *sizes))
    ops.run(*calls)
    return gated_activation(y, gate) if gate else y


CANDIDATE = Candidate(
    "blocks.h", "CPUs", "codes in blocks of 16 outputs, f32 or bf16, as many rows as pay on the processor", supports,
    linear,
)  # fmt: skip


def experts(
    x: Tensor, of: Packed, sizes: tuple[int, int], offsets: Tensor, bias: Tensor | None, y: Tensor,
    scratch: Scratch, at: Tensor | None = None, gated: Gated | None = None,
) -> ops.Calls:  # fmt: skip
    """Operations that make y [P, O] of x [P, I], whose rows are sorted by expert. of: the weights [O, I] of all
    experts, each filled up to whole blocks. sizes: experts, O. ends int32 [experts + 1]: where each one's rows begin.
    bias [experts, O]. at int64 [experts]: which of the stack's weights is each one's, where it is not its own number.
    gated: what x is made of first."""
    (count, outputs), planes = sizes, _planes(x, scratch)
    if gated is None:
        split = _split(x, planes, offsets, count)
    else:
        values = gated.both, offsets, x, planes, x.shape[1], count, limit_units(gated.act)
        split = ops.typed("int8_planes_cpu", f"split_gated_{kind(gated.act)}", x.dtype), values
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
