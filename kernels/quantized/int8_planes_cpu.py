"""Rows of x in int8 planes, as operations of weights in blocks read them: kernels/cpp/int8_planes.h."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from ..activation.activation import kind, limit_units
from ..cpp import ops
from ..cpp.scratch import Scratch

RUN = 32  # inputs that share a scale, and that lie together in blocks
RUN_BYTES = {torch.float32: 124, torch.bfloat16: 92}  # of a row in int8 planes, with its Sums, as in int8_planes.h


def max_rows(dtype: torch.dtype) -> int:
    """Up to how many rows x of a dtype in int8 planes is faster than a GEMM of the dequantised weight, on this
    processor."""
    return _most_rows(ops.libraries()["int8_planes_cpu"], ops.SUFFIXES[dtype])


@functools.cache
def _most_rows(library: ctypes.CDLL, suffix: str) -> int:
    return ctypes.c_int64.in_dll(library, f"max_rows_{suffix}").value


def empty(x: Tensor, scratch: Scratch) -> Tensor:
    """Memory for x [T, I] as int8 planes: uint8 [T, bytes]."""
    return scratch.empty(x, (len(x), x.shape[1] // RUN * RUN_BYTES[x.dtype]), torch.uint8)


def split(
    x: Tensor, planes: Tensor, offsets: Tensor | None = None, experts: int = 0
) -> tuple[ops.Op, tuple[ops.Value, ...]]:
    """The operation that makes int8 planes of x [T, I]. offsets int32 [experts + 1]: its first and last bound the rows;
    None: all."""
    return ops.typed("int8_planes_cpu", "split", x.dtype), (x, offsets, planes, *x.shape, x.stride(0), experts)


def split_gated(
    act: str, both: Tensor, x: Tensor, planes: Tensor, offsets: Tensor, experts: int
) -> tuple[ops.Op, tuple[ops.Value, ...]]:
    """The same, which first makes x [P, I], contiguous, of both [P, 2 I]: act(its first half) * its second half."""
    values = both, offsets, x, planes, x.shape[1], experts, limit_units(act)
    return ops.typed("int8_planes_cpu", f"split_gated_{kind(act)}", x.dtype), values
