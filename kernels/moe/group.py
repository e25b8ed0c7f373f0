"""Routed tokens (a token and one of its experts) sorted by expert and cut into tiles, and their rows side by side."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import jit
from ..quantized import e4m3_rows

THREADS = 1024  # of group.cu
# Routed tokens. One block takes 9.4 us of 8192, and the two kernels of more 4.7 of 16384 (H200, 2026-11-27).
MAX_OF_ONE_BLOCK = 4096
PART = 2048  # of a block
MAX_EXPERTS = 2048  # that group.cu has shared memory for
GATHER_WARPS = 8  # of a block of gather_routed.cu


class LocalExperts(NamedTuple):
    """The experts that a rank has, of a layer that is shared out. Routed tokens of others are left out of the sums."""

    first: int  # the router's number of w13[0] and w2[0]
    size: int  # E
    total: int  # that the router chooses from

    @property
    def ids(self) -> range:
        return range(self.first, self.first + self.size)


def max_tiles(routed: int, experts: int, rows: int) -> int:
    """Tiles that so many routed tokens take at most: of each expert that has routed tokens the last tile may be filled
    in part."""
    used = min(routed, experts)
    return (routed - used) // rows + used


class Groups(NamedTuple):
    """Routed tokens sorted by expert, as group.cu makes them."""

    sorted_ids: Tensor  # [P] int32: routed tokens, expert by expert; what is past the last expert's end is undefined
    offsets: Tensor  # [E + 1] int32: where each expert's begin in `sorted_ids`
    tile_expert: Tensor  # [tiles] int32; -1: not needed
    tile_start: Tensor  # [tiles] int32: first place in `sorted_ids`


def group(ids: Tensor, experts: int, rows: int, local_experts: LocalExperts | None = None) -> Groups:
    """Sort routed tokens [T, k] by expert and cut them into tiles of so many rows. Of routed tokens whose experts are
    not held none is there."""
    tiles = max_tiles(ids.numel(), experts, rows)
    of = [torch.empty(n, dtype=torch.int32, device=ids.device) for n in (ids.numel(), experts + 1, tiles, tiles)]
    found = Groups(*of)
    if not ids.is_cuda:
        return _reference(local_ids(ids, experts, local_experts), experts, rows, found)
    assert experts <= MAX_EXPERTS
    routed, first = ids.numel(), local_experts.first if local_experts else 0
    if routed <= MAX_OF_ONE_BLOCK:
        _kernel("group", experts, rows)((1, 1, 1), THREADS, ids, *found, routed, tiles, first)
        return found
    parts = -(-routed // PART)
    counts = torch.empty(parts, experts, dtype=torch.int32, device=ids.device)
    _kernel("count_parts", experts, rows)((parts, 1, 1), THREADS, ids, counts, routed, first)
    _kernel("group_parts", experts, rows)((parts, 1, 1), THREADS, ids, counts, *found, routed, tiles, first)
    return found


def _kernel(name: str, experts: int, rows: int) -> jit.Kernel:
    return jit.kernel("group", name, torch.int64, EXPERTS=experts, ROWS=rows, THREADS=THREADS, PART=PART)


def local_ids(ids: Tensor, experts: int, local_experts: LocalExperts | None) -> Tensor:
    """[routed]: each routed token's index in w13 and w2; `experts`, which is past their end, where they lack its
    expert."""
    local = ids.flatten().long()
    if local_experts:
        local = local - local_experts.first
        local = torch.where((local >= 0) & (local < experts), local, experts)
    return local


def _reference(local: Tensor, experts: int, rows: int, found: Groups) -> Groups:
    found.sorted_ids.copy_(local.argsort(stable=True))
    counts = torch.bincount(local, minlength=experts)[:experts]
    found.offsets.copy_(torch.cat((counts[:0].new_zeros(1), counts.cumsum(0))))
    found.tile_expert.fill_(-1)
    cut = [(e, at) for e in range(experts) for at in range(int(found.offsets[e]), int(found.offsets[e + 1]), rows)]
    for i, (e, at) in enumerate(cut):
        found.tile_expert[i], found.tile_start[i] = e, at
    return found


def gather_sizes(experts: int, inputs: int, top: int) -> dict[str, int]:
    """Compile-time constants of gather_routed.cu."""
    return dict(EXPERTS=experts, I=inputs, TOP=top, WARPS=GATHER_WARPS)


def gather(x: Tensor, groups: Groups, top: int, rows: int) -> Tensor:
    """Rows of x [T, H], `top` routed tokens each, in the order of the groups: [P, H], or more rows; those of routed
    tokens that are in no group are undefined. rows: of a tile."""
    routed, inputs = len(groups.sorted_ids), x.shape[1]
    y = x.new_empty(max(routed, rows), inputs)  # TMA's boxes have so many
    kernel = jit.kernel("gather_routed", "gather_routed", x.dtype, **gather_sizes(len(groups.offsets) - 1, inputs, top))
    kernel((-(-routed // GATHER_WARPS), 1, 1), GATHER_WARPS * 32, x, groups.sorted_ids, groups.offsets, y, routed)
    return y


class E4m3Routed(NamedTuple):
    """Rows of routed tokens in e4m3 as e4m3_experts.cu takes them, in the order of the groups; what is of routed tokens
    that are in no group is undefined."""

    codes: Tensor  # uint8 [P, I], or more rows
    scales: Tensor  # [P] f32
    weights: Tensor  # [P] f32, of the routed tokens


def encode_sizes(experts: int, inputs: int, top: int) -> dict[str, jit.Size]:
    """Compile-time constants of e4m3_routed.cu."""
    return dict(EXPERTS=experts, TOP=top, **e4m3_rows.sizes(inputs))


def encode_routed(x: Tensor, groups: Groups, weights: Tensor, top: int, least: int) -> E4m3Routed:
    """top: routed tokens of a row of x [T, I]; 0: x [P, I] is in the order of the groups. weights [T, k] f32: the
    routed tokens'. least: rows of codes that there are, as TMA's boxes have so many."""
    routed, inputs = len(groups.sorted_ids), x.shape[1]
    codes = torch.empty(max(routed, least), inputs, dtype=torch.uint8, device=x.device)
    rows = E4m3Routed(codes, *torch.empty(2, routed, device=x.device))
    of = encode_sizes(len(groups.offsets) - 1, inputs, top)
    kernel = jit.kernel("e4m3_routed", "e4m3_routed", x.dtype, 0, **of)
    kernel((routed, 1, 1), e4m3_rows.sizes(inputs)["THREADS"], x, groups.sorted_ids, groups.offsets, weights, *rows)
    return rows
