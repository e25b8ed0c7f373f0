"""Rotates queries and keys where they are, without a cache: those of images' towers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rotate_kernel(
    x, cos, sin, token_stride, head_stride, HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
):  # fmt: skip
    """A program for each token."""
    token = tl.program_id(0).to(tl.int64)
    heads, dims = tl.arange(0, HEADS_PADDED)[:, None], tl.arange(0, HALF_PADDED)[None, :]
    valid, there = (heads < HEADS) & (dims < HALF), dims < HALF
    at = x + token * token_stride + heads * head_stride + dims
    c = tl.load(cos + token * HALF + dims, mask=there, other=0.0)
    s = tl.load(sin + token * HALF + dims, mask=there, other=0.0)
    first = tl.load(at, mask=valid, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=valid, other=0.0).to(tl.float32)
    tl.store(at, (first * c - second * s).to(x.dtype.element_ty), mask=valid)
    tl.store(at + HALF, (second * c + first * s).to(x.dtype.element_ty), mask=valid)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Do what rope.rotate says. A head's elements lie side by side in x [N, heads, dim], and all of cos and sin do."""
    tokens, heads, dim = x.shape
    assert x.stride(2) == 1 and cos.is_contiguous() and sin.is_contiguous()
    padded = triton.next_power_of_2(heads), triton.next_power_of_2(dim // 2)
    rotate_kernel[(tokens,)](x, cos, sin, x.stride(0), x.stride(1), heads, padded[0], dim // 2, padded[1])
