"""The experts of a few pairs: two kernels that read weights pair by pair, of 16 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import jit
from ..activation.activation import ACTIVATIONS

if TYPE_CHECKING:
    from .moe import Inputs

# Most pairs, also by experts: of more, many have one in common, and tensor cores read its weights once.
MOST_PAIRS = 64
SHARE = 2
WARPS = 4  # of a block


def most_pairs(experts: int) -> int:
    """Of which it is the fastest."""
    return min(MOST_PAIRS, experts // SHARE)


def supports(x: Tensor, ids: Tensor, w13: Tensor, w2: Tensor) -> bool:
    """Whether `experts` takes these."""
    hidden, inner = w2.shape[1:]
    even = hidden % 8 == 0 and inner % 8 == 0 and ids.shape[1] <= 32  # a block's outputs, which are fewer, divide too
    return even and x.element_size() == 2 and x.dtype == w13.dtype == w2.dtype and jit.plain(x, w13, w2)


def experts(given: Inputs) -> Tensor:
    """`moe.fused_experts` of plain weights without biases."""
    x, ids, weights, w13, w2, act, _, held = given
    assert isinstance(w13, Tensor) and isinstance(w2, Tensor), "`supports` was not asked"
    (tokens, hidden), k, inner = x.shape, ids.shape[1], w2.shape[2]
    here = (held.first, held.size) if held else (0, 0)
    h = x.new_empty(tokens * k, inner)
    y = torch.empty_like(x)
    consts = sizes(hidden, inner, k, act, held is not None)
    up = jit.kernel("expert_gemv", "expert_up", x.dtype, **consts)
    up((tokens * k, inner // WARPS, 1), WARPS * 32, x, ids, weights, w13, h, *here)
    down = jit.kernel("expert_gemv", "expert_down", x.dtype, **consts)
    down((tokens, hidden // WARPS, 1), WARPS * 32, h, ids, w2, y, *here)
    return y


def sizes(hidden: int, inner: int, k: int, act: str, part: bool = False) -> dict[str, int]:
    """What expert_gemv.cu is compiled for. part: experts are shared out."""
    return dict(HIDDEN=hidden, INNER=inner, TOP=k, ACT=ACTIVATIONS.index(act), WARPS=WARPS, PART=int(part))
