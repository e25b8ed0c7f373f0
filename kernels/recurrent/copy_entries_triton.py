"""Copies of entries of many tensors in one launch, in Triton (copy_entries.py defines what is copied)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

EACH = 8192  # elements that one program copies


def copy_entries(starts: Tensor, widths: Tensor, source: Tensor, target: Tensor, widest: int) -> None:
    """starts, widths: int64 [tensors], the address of each tensor's f32 entries, and the elements of one. source,
    target: int64 [N]. widest: the largest of widths."""
    grid = triton.cdiv(widest, EACH), len(source), len(starts)
    copy_kernel[grid](starts, widths, source, target, EACH, num_warps=8)


@triton.jit
def copy_kernel(starts, widths, source, target, EACH: tl.constexpr):
    """EACH elements of one entry."""
    tensor, pair = tl.program_id(2), tl.program_id(1)
    width = tl.load(widths + tensor)
    start = tl.load(starts + tensor).to(tl.pointer_type(tl.float32))
    at = tl.program_id(0).to(tl.int64) * EACH + tl.arange(0, EACH)
    there = at < width
    values = tl.load(start + tl.load(source + pair) * width + at, mask=there)
    tl.store(start + tl.load(target + pair) * width + at, values, mask=there)
