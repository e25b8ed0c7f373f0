"""The scale search on GPUs, in Triton: scale_search.py describes the result. A program has some groups, which it reads
once; all scales are tried while they are in registers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

GROUPS = 64  # of a program
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: what is added to it and taken off again is whole, even at halves


def search(groups: Tensor, scales: Tensor, minima: Tensor | None, most: int, steps: int) -> None:
    """groups f32 [..., n], contiguous; n is a power of two. Fills scales, and minima where they are wanted."""
    count = scales.numel()
    grid, sizes = (triton.cdiv(count, GROUPS),), (count, groups.shape[-1], most, steps, GROUPS)
    if minima is None:
        signed_kernel[grid](groups, scales, *sizes, num_warps=4)
    else:
        minima_kernel[grid](groups, scales, minima, *sizes, num_warps=4)


@triton.jit
def load_groups(groups, count, SIZE: tl.constexpr, GROUPS: tl.constexpr):
    """Their numbers, whether there are so many, and x [GROUPS, SIZE]."""
    mine = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    there = mine < count
    at = mine[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    return mine, there, tl.load(groups + at, mask=there[:, None], other=0.0)


@triton.jit
def codes_of(x, inverse, low, high):
    return tl.minimum(tl.maximum(x * inverse[:, None], low), high) + ROUND - ROUND


@triton.jit
def minima_kernel(
    groups, scales, minima, count,
    SIZE: tl.constexpr, MAX_CODE: tl.constexpr, STEPS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    mine, there, x = load_groups(groups, count, SIZE, GROUPS)
    low = tl.minimum(tl.min(x, 1), 0.0)
    span = tl.maximum(tl.max(x, 1), 0.0) - low
    total = tl.sum(x, 1)
    lifted = x - low[:, None]
    best_scale, best_minimum = span / MAX_CODE, -low
    best = tl.full([GROUPS], float("inf"), tl.float32)
    inverse = tl.where(span > 0.0, 1.0 / tl.where(span > 0.0, span, 1.0), 0.0)
    for step in range(STEPS):
        codes = codes_of(lifted, (MAX_CODE - 1 + 2.0 * step / STEPS) * inverse, 0.0, MAX_CODE * 1.0)
        sums, squares, products = tl.sum(codes, 1), tl.sum(codes * codes, 1), tl.sum(codes * x, 1)
        spread = SIZE * squares - sums * sums
        scale = tl.where(spread > 0.0, (SIZE * products - sums * total) / tl.maximum(spread, 1.0), best_scale)
        minimum = (scale * sums - total) / SIZE
        alone = products / tl.maximum(squares, 1.0)  # where the best minimum would be below 0
        scale, minimum = tl.where(minimum < 0.0, alone, scale), tl.maximum(minimum, 0.0)
        lost = codes * scale[:, None] - minimum[:, None] - x
        error = tl.sum(lost * lost, 1)
        better = (error < best) & (scale >= 0.0) & (spread > 0.0)
        best = tl.where(better, error, best)
        best_scale, best_minimum = tl.where(better, scale, best_scale), tl.where(better, minimum, best_minimum)
    tl.store(scales + mine, best_scale, mask=there)
    tl.store(minima + mine, best_minimum, mask=there)


@triton.jit
def signed_kernel(
    groups, scales, count, SIZE: tl.constexpr, MAX_CODE: tl.constexpr, STEPS: tl.constexpr, GROUPS: tl.constexpr
):
    mine, there, x = load_groups(groups, count, SIZE, GROUPS)
    above, below = tl.max(x, 1), tl.min(x, 1)
    largest = tl.where(above >= -below, above, below)
    inverse = tl.where(largest == 0.0, 0.0, -1.0 / tl.where(largest == 0.0, 1.0, largest))
    found, best = largest / -MAX_CODE, tl.full([GROUPS], float("inf"), tl.float32)
    for step in range(STEPS):
        codes = codes_of(x, (MAX_CODE - 1 + 2.0 * step / STEPS) * inverse, -MAX_CODE * 1.0, MAX_CODE - 1.0)
        squares = tl.sum(codes * codes, 1)
        scale = tl.sum(codes * x, 1) / tl.maximum(squares, 1.0)
        lost = codes * scale[:, None] - x
        error = tl.sum(lost * lost, 1)
        better = (error < best) & (squares > 0.0)
        best, found = tl.where(better, error, best), tl.where(better, scale, found)
    tl.store(scales + mine, found, mask=there)
