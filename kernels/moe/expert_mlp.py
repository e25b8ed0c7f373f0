"""Both grouped GEMMs of experts with few pairs each in one launch, on sm_90 and sm_100."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import jit
from ..activation.activation import ACTIVATIONS
from ..device import device_caps
from . import expert_gemm

if TYPE_CHECKING:
    from .moe import Groups

OUTPUTS = 128  # of an item's weights
WARPS = OUTPUTS // 16 + 2  # of a block
# Bytes of a block: the router's blocks, of 10 KB, and those of the norm before it and of group.cu fit beside it.
SHARED = 212 << 10
MOST_STAGES = 12
# Pairs per expert → tiles of 8 pairs that an item has, so that most experts are one item; of more Triton's are taken.
TILES = {4: 1, 8: 2, 24: 4}
MOST_PAIRS = max(TILES)


def supports(x: Tensor, w13: Tensor, w2: Tensor) -> bool:
    """Whether `expert_mlp` takes these."""
    return w2.shape[1] % OUTPUTS == 0 and expert_gemm.supports(x, w13, w2)


def choose_tiles(pairs: int, experts: int) -> int:
    """Of 8 pairs, that an item has at most."""
    return next(tiles for most, tiles in TILES.items() if pairs <= most * experts)


def sizes(hidden: int, inner: int, act: str, top: int, tiles: int) -> dict[str, int]:
    """What expert_mlp.cu is compiled for."""
    return dict(
        HIDDEN=hidden,
        INNER=inner,
        KC=_chunk(hidden, inner),
        STAGES=stages(hidden, inner, tiles)[0],
        TILES=tiles,
        ACT=ACTIVATIONS.index(act),
        TOP=top,
    )


def _chunk(hidden: int, inner: int) -> int:
    """Inputs that a block multiplies at once."""
    return 64 if hidden % 128 or inner % 128 else 128


def stages(hidden: int, inner: int, tiles: int) -> tuple[int, int]:
    """Chunks that a block holds at once, and all bytes of its shared memory, as expert_mlp.cu lays it out."""
    rows = 8 * tiles
    sums = OUTPUTS * (rows + 1) * 4
    stage = (OUTPUTS + rows) * _chunk(hidden, inner) * 2
    count = min((SHARED - 1024 - sums) // stage, MOST_STAGES)
    return count, 1024 + count * stage + sums


def expert_mlp(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, groups: Groups, act: str, tiles: int
) -> Tensor:
    """[pairs, H], in the pairs' own order: the pairs' weights * w2 (act(gate) * up), of x [T, H], w13 [E, 2 I, H] and
    w2 [E, H, I]. groups: in tiles of 8 * tiles rows."""
    pairs, (experts, hidden, inner) = ids.numel(), w2.shape
    shared = stages(hidden, inner, tiles)[1]
    kernel = jit.kernel("expert_mlp", "expert_mlp", x.dtype, shared, **sizes(hidden, inner, act, ids.shape[1], tiles))
    of_w13 = jit.tensor_map(w13.data_ptr(), experts * 2 * inner, hidden, OUTPUTS // 2, hidden)
    of_w2 = jit.tensor_map(w2.data_ptr(), experts * hidden, inner, OUTPUTS, inner)
    h, y = x.new_empty(pairs, inner), x.new_empty(pairs, hidden)
    count = len(groups.tile_expert)
    assert count < jit.COUNTERS
    done = jit.counters(x.device, torch.cuda.current_stream().cuda_stream)
    blocks = min(device_caps(x.device).num_sms, count * max(2 * inner, hidden) // OUTPUTS)
    kernel((blocks, 1, 1), WARPS * 32, x, of_w13, of_w2, *groups, weights, h, y, done, count, experts, shared=shared)
    return y
