"""nibble_permutation.py in Triton; imported on GPUs."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .nibble_permutation import Permutation

SPAN = 1024  # bytes of a unit that a program makes
EACH = 8  # units, one after the other: where its bytes come from stays in registers


@triton.jit(do_not_specialize=["units"])
def permute_kernel(
    given, out, table, flips, units, parts, SIZE: tl.constexpr, MADE: tl.constexpr, SPAN: tl.constexpr,
    EACH: tl.constexpr, OF: tl.constexpr,
):  # fmt: skip
    """out [units, MADE] of given [units, SIZE]; of the first parts [1] * OF units alone, where OF is not 0."""
    if OF:
        units = tl.load(parts) * OF
        if tl.program_id(0) * EACH >= units:  # most steps of few tokens have none
            return
    at = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    real = (at < MADE) & (tl.program_id(0) * EACH < units)
    both = tl.load(table + at, mask=real, other=0)
    flip = tl.load(flips + at, mask=real, other=0).to(tl.int32)
    low, high = both & 0xFFFF, (both >> 16) & 0xFFFF
    for i in range(EACH):
        unit = (tl.program_id(0) * EACH + i).to(tl.int64)
        there = real & (unit < units)
        from_low = tl.load(given + unit * SIZE + (low >> 1), mask=there, other=0).to(tl.int32) >> ((low & 1) * 4)
        from_high = tl.load(given + unit * SIZE + (high >> 1), mask=there, other=0).to(tl.int32) >> ((high & 1) * 4)
        made = ((from_low & 15) | ((from_high & 15) << 4)) ^ flip
        tl.store(out + unit * MADE + at, made.to(tl.uint8), mask=there)


def permute(permutation: Permutation, given: Tensor, out: Tensor, parts: Tensor | None = None) -> None:
    units, made = given.numel() // permutation.size, len(permutation.table)
    grid = triton.cdiv(units, EACH), triton.cdiv(made, SPAN)
    of = 0 if parts is None else units // len(given)
    count = permutation.table if parts is None else parts
    permute_kernel[grid](
        given, out, permutation.table, permutation.flips, units, count, permutation.size, made, SPAN, EACH, of
    )
