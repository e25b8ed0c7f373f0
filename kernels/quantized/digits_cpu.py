"""Rows of x in digits, as operations of weights in blocks read them: kernels/cpp/digits.h."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cpp import ops
from ..cpp.scratch import Scratch

RUN = 32  # inputs that share a scale, and that lie together in blocks
RUN_BYTES = {torch.float32: 124, torch.bfloat16: 92}  # of a row in digits, with its Sums, as in digits.h


def empty(x: Tensor, scratch: Scratch) -> Tensor:
    """Where x [T, I] will be in digits: uint8 [T, bytes]."""
    return scratch.empty(x, (len(x), x.shape[1] // RUN * RUN_BYTES[x.dtype]), torch.uint8)


def split(
    x: Tensor, digits: Tensor, ends: Tensor | None = None, experts: int = 0
) -> tuple[ops.Op, tuple[ops.Value, ...]]:
    """The operation that makes digits of x [T, I]. ends int32 [experts + 1]: its first and last say which rows; None:
    all."""
    return ops.typed("digits_cpu", "split", x.dtype), (x, ends, digits, *x.shape, x.stride(0), experts)


def split_gated(
    act: str, both: Tensor, x: Tensor, digits: Tensor, ends: Tensor, experts: int
) -> tuple[ops.Op, tuple[ops.Value, ...]]:
    """The same, which first makes x [P, I], contiguous, of both [P, 2 I]: act(its first half) * its second half."""
    return ops.typed("digits_cpu", f"split_gated_{act}", x.dtype), (both, ends, x, digits, x.shape[1], experts)
