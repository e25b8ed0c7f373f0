"""Pairs of a token and one of its experts sorted by expert, and cut into tiles, which grouped GEMMs take."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import jit

THREADS = 1024  # of group.cu
# Pairs. One block takes 9.4 us of 8192, and the two kernels of more 4.7 of 16384 (H200, 2026-11-27).
MOST_OF_ONE_BLOCK = 4096
PART = 2048  # of a block
MOST_EXPERTS = 2048  # that group.cu has shared memory for


class Held(NamedTuple):
    """The experts that a rank has, of a layer that is shared out. Pairs of others are left out of the sums."""

    first: int  # the router's number of w13[0] and w2[0]
    size: int  # E
    total: int  # that the router chooses from

    @property
    def ids(self) -> range:
        return range(self.first, self.first + self.size)


def most_tiles(pairs: int, experts: int, rows: int) -> int:
    """Tiles that so many pairs take at most: of each expert that has pairs the last tile may be filled in part."""
    used = min(pairs, experts)
    return (pairs - used) // rows + used


class Groups(NamedTuple):
    """Pairs sorted by expert, as group.cu makes them."""

    order: Tensor  # [P] int32: pairs, expert by expert; what is past the last expert's end is undefined
    ends: Tensor  # [E + 1] int32: where each expert's begin in `order`
    tile_expert: Tensor  # [tiles] int32; -1: not needed
    tile_start: Tensor  # [tiles] int32: first place in `order`


def group(ids: Tensor, experts: int, rows: int, held: Held | None = None) -> Groups:
    """Sort pairs [T, k] by expert and cut them into tiles of so many rows. Of pairs whose experts are not held none
    is there."""
    tiles = most_tiles(ids.numel(), experts, rows)
    of = [torch.empty(n, dtype=torch.int32, device=ids.device) for n in (ids.numel(), experts + 1, tiles, tiles)]
    found = Groups(*of)
    if not ids.is_cuda:
        return _reference(local_experts(ids, experts, held), experts, rows, found)
    assert experts <= MOST_EXPERTS
    pairs, first = ids.numel(), held.first if held else 0
    if pairs <= MOST_OF_ONE_BLOCK:
        _kernel("group", experts, rows)((1, 1, 1), THREADS, ids, *found, pairs, tiles, first)
        return found
    parts = -(-pairs // PART)
    counts = torch.empty(parts, experts, dtype=torch.int32, device=ids.device)
    _kernel("count_parts", experts, rows)((parts, 1, 1), THREADS, ids, counts, pairs, first)
    _kernel("group_parts", experts, rows)((parts, 1, 1), THREADS, ids, counts, *found, pairs, tiles, first)
    return found


def _kernel(name: str, experts: int, rows: int) -> jit.Kernel:
    return jit.kernel("group", name, torch.int64, EXPERTS=experts, ROWS=rows, THREADS=THREADS, PART=PART)


def local_experts(ids: Tensor, experts: int, held: Held | None) -> Tensor:
    """[pairs]: each pair's index in w13 and w2; `experts`, which is past their end, where they lack its expert."""
    local = ids.flatten().long()
    if held:
        local = local - held.first
        local = torch.where((local >= 0) & (local < experts), local, experts)
    return local


def _reference(local: Tensor, experts: int, rows: int, found: Groups) -> Groups:
    found.order.copy_(local.argsort(stable=True))
    counts = torch.bincount(local, minlength=experts)[:experts]
    found.ends.copy_(torch.cat((counts[:0].new_zeros(1), counts.cumsum(0))))
    found.tile_expert.fill_(-1)
    cut = [(e, at) for e in range(experts) for at in range(int(found.ends[e]), int(found.ends[e + 1]), rows)]
    for i, (e, at) in enumerate(cut):
        found.tile_expert[i], found.tile_start[i] = e, at
    return found
