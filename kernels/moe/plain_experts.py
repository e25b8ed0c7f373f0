"""Experts of plain weights on GPUs: a GEMV, and grouped GEMMs by wgmma on Hopper or in Triton.

Grouped GEMMs take packed weights as well, of which some experts at a time become plain: dequantising reads and writes
memory once for all of an expert's routed tokens, and GEMMs of plain weights need fewer instructions for each. So of
many routed tokens per expert this is faster than multiplying codes. expert_mlp.py has what is between few and many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .. import jit
from ..activation.activation import act_number
from ..device import DeviceCaps, device_caps
from ..quantized.stack import Stack
from .group import Groups, gather, group

if TYPE_CHECKING:
    from .moe import Inputs, Matrices

# -- a few routed tokens: two kernels that read weights routed token by routed token, of 16 bits (expert_gemv.cu)

GEMV_WARPS = 4  # of a block


def gemv_takes(x: Tensor, ids: Tensor, w13: object, w2: object) -> bool:
    """Whether `gemv` takes these."""
    if not isinstance(w13, Tensor) or not isinstance(w2, Tensor):
        return False
    even = all(length % 8 == 0 for length in w2.shape[1:]) and ids.shape[1] <= 32  # so a block's outputs divide, too
    return even and x.element_size() == 2 and x.dtype == w13.dtype == w2.dtype and jit.plain(x, w13, w2)


def gemv(given: Inputs) -> Tensor:
    """[T, H], the weighted sums over each token's experts, without biases."""
    x, ids, weights, w13, w2, act, _, local_experts, gated = given
    assert isinstance(w13, Tensor) and isinstance(w2, Tensor), "`gemv_takes` was not asked"
    (tokens, hidden), k, inner = x.shape, ids.shape[1], w2.shape[2]
    here = (local_experts.first, local_experts.size) if local_experts else (0, 0)
    h, y = x.new_empty(tokens * k, inner), torch.empty_like(x)
    consts = gemv_sizes(hidden, inner, k, act, local_experts is not None, gated)
    up = jit.kernel("expert_gemv", "expert_up", x.dtype, **consts)
    up((tokens * k, inner // GEMV_WARPS, 1), GEMV_WARPS * 32, x, ids, weights, w13, h, *here)
    down = jit.kernel("expert_gemv", "expert_down", x.dtype, **consts)
    down((tokens, hidden // GEMV_WARPS, 1), GEMV_WARPS * 32, h, ids, w2, y, *here)
    return y


def gemv_sizes(hidden: int, inner: int, k: int, act: str, part: bool = False, gated: bool = True) -> dict[str, int]:
    """Compile-time constants of expert_gemv.cu. part: experts are shared out."""
    of = dict(HIDDEN=hidden, INNER=inner, TOP=k, WARPS=GEMV_WARPS, PART=int(part))
    return of | dict(GATED=int(gated), ACT=act_number(act))


# -- packed weights that become plain

AT_ONCE = 1 << 27  # elements that are plain at once: 256 MB in 16 bits


def by_parts(
    stack: Matrices, groups: Groups, bias: Tensor | None, dtype: torch.dtype,
    multiply: Callable[[Tensor, Groups, Tensor | None], object],
) -> None:  # fmt: skip
    """Call multiply(weights, groups, bias) for some experts after the others, or once where the stack is not packed.

    The groups' places are the same in all calls. A call has the tiles of its own experts alone, whose numbers begin at
    0 there. bias [E, outputs].
    """
    if not isinstance(stack, Stack):
        assert isinstance(stack, Tensor), "GPUs have no kernels for others"
        multiply(stack, groups, bias)
        return
    for first, last in ranges(*stack.shape):
        own = None if bias is None else bias[first:last]
        # No name holds the weights, so that the next ones get their memory.
        multiply(stack.some(first, last, dtype), part_of(groups, first, last), own)


def ranges(experts: int, outputs: int, inputs: int) -> Iterator[tuple[int, int]]:
    """First and last of the experts that are plain at once, parts of nearly one size."""
    count = -(-experts // max(1, AT_ONCE // (outputs * inputs)))
    return ((experts * i // count, experts * (i + 1) // count) for i in range(count))


def part_of(groups: Groups, first: int, last: int) -> Groups:
    """Without the tiles of other experts than first to last, which are numbered from 0 on."""
    if (first, last) == (0, len(groups.offsets) - 1):
        return groups  # all of them: nothing is launched
    tiles = groups.tile_expert
    mine = torch.where((tiles >= first) & (tiles < last), tiles - first, -1)
    # Theirs first, as kernels end at the first that is not needed.
    sorted_ids = (mine < 0).to(torch.uint8).argsort(stable=True)
    offsets = groups.offsets[first : last + 1].clone()  # kernels like it aligned
    return groups._replace(tile_expert=mine[sorted_ids], tile_start=groups.tile_start[sorted_ids], offsets=offsets)


# -- many routed tokens on Hopper, where all time goes into multiplying (wgmma_experts.cu)

WGMMA_OUTPUTS = 256  # of the weights in a tile
WGMMA_CHUNK = 64  # inputs that a block multiplies at once
MAX_SHARED = 227 << 10  # bytes of shared memory that a block may have on Hopper
# Most routed tokens per expert → routed tokens of a tile, 128 or 192 (H200, 2026-11-26, benchmarks/ops_moe.py): of 128
# routed tokens most experts have one tile of 192, which takes 6 % less of a layer of Qwen3-30B-A3B than tiles of 128;
# of 256 it takes 23 % more, and of 512, also of Mixtral-8x7B, as long within 4 %.
WGMMA_ROWS = {160: 192, 1 << 30: 128}


def wgmma_takes(given: Inputs, caps: DeviceCaps) -> bool:
    """Whether `by_wgmma` takes these, plain or packed."""
    x, w13, w2 = given.x, given.w13, given.w2
    if x.element_size() != 2 or any(length % 8 for length in w2.shape[1:]) or not caps.hopper:
        return False
    return all(
        isinstance(w, Stack) or (isinstance(w, Tensor) and w.dtype == x.dtype and jit.plain(w)) for w in (w13, w2)
    )


def wgmma_rows(routed: int, experts: int) -> int:
    """The fastest tiles of so many routed tokens of all experts."""
    return next(rows for most, rows in WGMMA_ROWS.items() if routed <= most * experts)


def wgmma_sizes(outputs: int, inputs: int, act: str, bias: bool, rows: int, gated: bool = True) -> dict[str, int]:
    """Compile-time constants of wgmma_experts.cu. act: of the first GEMM, with a gate if gated; "": it is the second
    one."""
    of = dict(M=WGMMA_OUTPUTS, KC=WGMMA_CHUNK, ROWS=rows, STAGES=wgmma_stages(rows)[0])
    up = dict(UP=int(bool(act)), GATED=int(bool(act) and gated), ACT=act_number(act) if act else 0)
    return dict(I=inputs, OUTPUTS=outputs, **of, BIAS=int(bias), **up)


def wgmma_stages(rows: int) -> tuple[int, int]:
    """Chunks that a block holds at once, and all bytes of its shared memory, as wgmma_experts.cu lays it out."""
    stage = (rows + WGMMA_OUTPUTS) * WGMMA_CHUNK * 2
    count = (MAX_SHARED - 2048) // stage  # 2048: to begin at a multiple of 1024, and barriers
    return count, 1024 + count * stage


def by_wgmma(given: Inputs, rows: int) -> Tensor:
    """[T * k, H], where `wgmma_takes` takes it. rows: routed tokens of a tile."""
    x, ids, weights, w13, w2, act, biases, local_experts, gated = given
    groups = group(ids, w13.shape[0], rows, local_experts)
    gathered = gather(x, groups, ids.shape[1], rows)
    h, y = x.new_empty(len(gathered), w2.shape[2]), x.new_empty(ids.numel(), w2.shape[1])
    both = partial(_wgmma, weights=weights, rows=rows, gated=gated)
    by_parts(w13, groups, biases.up, x.dtype, partial(both, x=gathered, y=h, act=act))
    by_parts(w2, groups, biases.down, x.dtype, partial(both, x=h, y=y, act=""))
    return y


def _wgmma(
    weight: Tensor, groups: Groups, bias: Tensor | None, *, x: Tensor, weights: Tensor, y: Tensor, act: str, rows: int,
    gated: bool,
) -> None:  # fmt: skip
    """Fill y of x [P, inputs] in the order of the groups and weight [E, outputs, inputs]. With an activation, y
    [P, outputs / 2] is the routed tokens' weights * act(gate) * up in that order, or, not gated, y [P, outputs] is
    theirs * act(up); else y [P, outputs] is in the routed tokens' own order, of an x that has the weights in it. bias
    [E, outputs]: added, times the routed tokens' weights."""
    experts, outputs, inputs = weight.shape
    of = wgmma_sizes(outputs, inputs, act, bias is not None, rows, gated)
    kernel = jit.kernel("wgmma_experts", "wgmma_experts", x.dtype, shared := wgmma_stages(rows)[1], **of)
    of_x = jit.tensor_map(x.data_ptr(), len(x), inputs, rows, inputs)
    of_w = jit.tensor_map(weight.data_ptr(), experts * outputs, inputs, WGMMA_OUTPUTS // 2, inputs)
    tiles = len(groups.tile_expert)
    blocks = min(tiles * -(-outputs // WGMMA_OUTPUTS), device_caps(x.device).num_sms)
    args = of_x, of_w, y if bias is None else bias, weights, *groups, y, tiles
    kernel((blocks, 1, 1), rows * 2 + 128, *args, shared=shared)


# -- whatever the sizes and the GPU (moe_triton.py)


class TileConfig(NamedTuple):
    """The tiles of a grouped GEMM."""

    rows: int  # routed tokens of one expert
    outputs: int  # of w13: so many of gate and as many of up
    inputs: int  # of a step
    warps: int
    stages: int


class Tiling(NamedTuple):
    """Both GEMMs; their tiles have the same rows."""

    up: TileConfig
    down: TileConfig


# Most routed tokens per expert → tiles. An expert with more tokens than a tile has rows is read twice, so that an
# average of 32 already takes tiles of 64.
TILINGS = {
    8: Tiling(TileConfig(16, 64, 128, 4, 3), TileConfig(16, 128, 128, 4, 3)),
    24: Tiling(TileConfig(32, 64, 128, 4, 3), TileConfig(32, 128, 128, 4, 3)),
    48: Tiling(TileConfig(64, 64, 64, 4, 3), TileConfig(64, 128, 64, 4, 3)),
    1 << 30: Tiling(TileConfig(128, 128, 64, 8, 3), TileConfig(128, 256, 64, 8, 3)),
}
F32_TILING = Tiling(TileConfig(16, 32, 32, 4, 2), TileConfig(16, 32, 32, 4, 2))


def tiling(routed: int, experts: int, dtype: torch.dtype) -> Tiling:
    """The fastest of so many routed tokens."""
    if dtype == torch.float32:
        return F32_TILING
    return next(tiles for most, tiles in TILINGS.items() if routed <= most * experts)


def by_triton(given: Inputs, tiles: Tiling) -> Tensor:
    """[T * k, H]."""
    from . import moe_triton

    x, ids, weights, w13, w2, act, biases, local_experts, gated = given
    groups = group(ids, w13.shape[0], tiles.up.rows, local_experts)
    kind, dtype = act_number(act), x.dtype
    h, y = x.new_empty(ids.numel(), w2.shape[2]), x.new_empty(ids.numel(), w2.shape[1])
    by_parts(
        w13, groups, biases.up, dtype,
        lambda some, mine, bias: moe_triton.expert_up(x, ids, weights, some, mine, kind, tiles.up, bias, h, gated),
    )  # fmt: skip
    by_parts(
        w2, groups, biases.down, dtype,
        lambda some, mine, bias: moe_triton.expert_down(h, some, mine, tiles.down, weights, bias, y),
    )  # fmt: skip
    return y
