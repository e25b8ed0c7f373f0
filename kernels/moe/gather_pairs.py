"""Rows of pairs brought side by side, expert by expert, for kernels that read them by TMA."""

from __future__ import annotations

from torch import Tensor

from .. import jit
from .group import Groups

WARPS = 8  # of a block


def sizes(experts: int, inputs: int, top: int) -> dict[str, int]:
    """What gather_pairs.cu is compiled for."""
    return dict(EXPERTS=experts, I=inputs, TOP=top, WARPS=WARPS)


def gather(x: Tensor, groups: Groups, top: int, rows: int) -> Tensor:
    """Rows of x [T, H], `top` pairs each, in the order of the groups: [P, H], or more rows; those of pairs that are in
    no group are undefined. rows: of a tile."""
    pairs, inputs = len(groups.order), x.shape[1]
    y = x.new_empty(max(pairs, rows), inputs)  # TMA's boxes have so many
    kernel = jit.kernel("gather_pairs", "gather_pairs", x.dtype, **sizes(len(groups.ends) - 1, inputs, top))
    kernel((-(-pairs // WARPS), 1, 1), WARPS * 32, x, groups.order, groups.ends, y, pairs)
    return y
