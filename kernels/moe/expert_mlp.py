"""Both grouped GEMMs of experts with few routed tokens each in one launch, on sm_90 and sm_100."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .. import jit
from ..activation.activation import act_number
from ..device import current_stream, device_caps
from .group import Groups, group

if TYPE_CHECKING:
    from .moe import Inputs

OUTPUTS = 128  # of an item's weights
WARPS = OUTPUTS // 16 + 2  # of a block
# Bytes of a block: the router's blocks, of 10 KB, and those of the norm before it and of group.cu fit next to it.
SMEM_BYTES = 212 << 10
MAX_STAGES = 12
# Routed tokens per expert → tiles of 8 routed tokens that an item has, so that most experts are one item; of more
# Triton's are taken (H200, 2026-11-27 and 2026-11-30, benchmarks/ops_moe.py: of 12 routed tokens a layer of Nemotron 3
# Nano takes 615 us here and 620 there, one of DeepSeek-V2-Lite 275 and 269, of 16 one of Qwen3-30B-A3B 316 and 301, of
# 8 one of it 285 and 288).
TILES = {4: 1, 8: 2, 12: 4}


def supports(x: Tensor, w13: object, w2: object) -> bool:
    """Whether `expert_mlp` takes these."""
    if not isinstance(w13, Tensor) or not isinstance(w2, Tensor):
        return False
    sizes = all(length % 8 == 0 for length in w2.shape[1:])  # as TMA asks
    same = x.element_size() == 2 and x.dtype == w13.dtype == w2.dtype
    return same and sizes and jit.plain(x, w13, w2) and device_caps(x.device).has_tma


def choose_tiles(routed: int, experts: int) -> int:
    """The largest number of 8-row tiles in an item."""
    return next(tiles for most, tiles in TILES.items() if routed <= most * experts)


def sizes(
    hidden: int, inner: int, act: str, top: int, tiles: int, gated: bool = True, chunk: int = 0
) -> dict[str, int]:
    """Compile-time constants of expert_mlp.cu. chunk: chosen unless given."""
    chunk = chunk or choose_chunk(hidden, inner)
    return dict(
        HIDDEN=hidden, INNER=inner, KC=chunk, STAGES=stages(chunk, tiles)[0], TILES=tiles, GATED=int(gated),
        ACT=act_number(act), TOP=top,
    )  # fmt: skip


def choose_chunk(hidden: int, inner: int) -> int:
    """Inputs that a block multiplies at once: 128, unless zeros that fill up the last ones would be many."""
    return 128 if all(-length % 128 * 8 <= length for length in (hidden, inner)) else 64


def stages(chunk: int, tiles: int) -> tuple[int, int]:
    """Chunks that a block holds at once, and all bytes of its shared memory, as expert_mlp.cu lays it out."""
    rows = 8 * tiles
    sums = OUTPUTS * (rows + 1) * 4
    stage = (OUTPUTS + rows) * chunk * 2
    count = min((SMEM_BYTES - 1024 - sums) // stage, MAX_STAGES)
    return count, 1024 + count * stage + sums


def experts(given: Inputs, tiles: int = 0, chunk: int = 0) -> Tensor:
    """`expert_mlp` of these, which it supports, without biases. tiles: of 8 rows; they and the chunk are chosen unless
    given."""
    x, ids, weights, w13, w2, act, _, local_experts, _ = given
    assert isinstance(w13, Tensor) and isinstance(w2, Tensor), "`supports` was not asked"
    tiles = tiles or choose_tiles(given.routed, given.experts)
    groups = group(ids, len(w13), 8 * tiles, local_experts)
    return expert_mlp(x, ids, weights, w13, w2, groups, act, tiles, chunk)


def expert_mlp(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, groups: Groups, act: str, tiles: int,
    chunk: int = 0,
) -> Tensor:  # fmt: skip
    """[routed, H], in the routed tokens' own order: the routed tokens' weights * w2 (act(gate) * up), of x [T, H], w13
    [E, 2 I, H] and w2 [E, H, I]; or * w2 act(up), of w13 [E, I, H]. groups: in tiles of 8 * tiles rows."""
    (experts, hidden, inner), routed, count = w2.shape, ids.numel(), len(groups.tile_expert)
    gated, half = w13.shape[1] != inner, OUTPUTS // 2
    consts = sizes(hidden, inner, act, ids.shape[1], tiles, gated, chunk)
    memory = stages(consts["KC"], tiles)[1]
    kernel = jit.kernel("expert_mlp", "expert_mlp", x.dtype, memory, **consts)
    of_w13 = jit.tensor_map(w13.data_ptr(), experts * w13.shape[1], hidden, half, hidden)
    of_w2 = jit.tensor_map(w2.data_ptr(), experts * hidden, inner, half, inner)
    h, y = x.new_empty(routed, inner), x.new_empty(routed, hidden)
    assert count + 3 <= jit.COUNTERS
    done = jit.counters(x.device, current_stream())
    items = max(-(-inner // (half if gated else OUTPUTS)), -(-hidden // OUTPUTS))  # of a tile in either GEMM
    blocks = min(device_caps(x.device).num_sms, count * items)
    args = x, of_w13, of_w2, *groups, weights, h, y, done, count, experts
    kernel((blocks, 1, 1), WARPS * 32, *args, shared=memory)
    return y
