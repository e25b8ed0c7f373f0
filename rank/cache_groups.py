"""Cache groups: layers that keep the same tokens of a sequence, and so share its block table.

Layers with sliding-window attention read a sequence's newest tokens only. So they are a group of their own, whose
blocks are freed once they are behind the window; layers that read all tokens are another group, and windows of several
widths are several. All groups take blocks from one pool. A block of the pool belongs to one sequence and one group at a
time, and has the same bytes in each: a group of few layers has more tokens in it, several entries of its block table.

The scheduler decides by this which blocks a sequence has (rank/scheduler/blocks.py); the ranks, where they lie
(rank/worker/kv_cache.py); `phalanx fit`, how many there are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# Attention kernels for prompts read keys by tiles of up to so many tokens, and mask those behind the window. A NaN in
# another sequence's block would pass the mask. So blocks are freed that many tokens later.
TILE = 128
MAX_ENTRIES = 8  # of a block: a prefix hit ends where blocks of all groups end
TYPICAL = 4096  # tokens of the sequence by which the number of entries is chosen


class CacheGroup(NamedTuple):
    window: int = 0  # its layers read the newest `window` tokens only; 0: all
    entries: int = 1  # of the block table, with which a block of the pool is entered
    chunked: bool = False  # ... and of these the newest chunk's: a sequence is cut into chunks of `window` tokens


Groups = tuple[CacheGroup, ...]  # where there are several, the one that reads all tokens is the first
ONE_GROUP: Groups = (CacheGroup(),)


def first_read(window: int, computed: int, chunked: bool = False) -> int:
    """The first token that the layers of a group may read where so many tokens of a sequence are computed, of which
    some may be drafts that are rejected later."""
    if chunked:
        return max(0, computed - TILE) // window * window
    return max(0, computed + 2 - window - TILE) if window else 0


def effective_window(window: int, longest: int) -> int:
    """0 where the window frees nothing of a sequence of `longest` tokens."""
    return window if first_read(window, longest) else 0


def choose_groups(stages: Sequence[Mapping[int, int]], block_size: int) -> Groups:
    """The groups of a model, and the entries with which a sequence of TYPICAL tokens takes the least memory.

    stages: of each pipeline stage, how many layers have each window.
    """
    windows = sorted({window for stage in stages for window in stage}, key=lambda window: (window > 0, -window))
    if len(windows) < 2:
        return tuple(map(CacheGroup, windows)) or ONE_GROUP
    layers = [sum(stage.get(window, 0) for stage in stages) for window in windows]
    most = max(layers)
    choices = [
        tuple(CacheGroup(w, min(lanes // n, MAX_ENTRIES)) for w, n in zip(windows, layers, strict=True))
        for lanes in range(most, 2 * most)
    ]

    def memory(groups: Groups) -> int:
        return held(groups, block_size, TYPICAL, 1) * sum(lanes(groups, stage) for stage in stages)

    return min(choices, key=memory)


def lanes(groups: Groups, layers: Mapping[int, int]) -> int:
    """How many layers' blocks of one entry a block of the pool takes in a stage with so many layers of each window."""
    return max(group.entries * layers.get(group.window, 0) for group in groups)


def covering(group: CacheGroup, block_size: int, tokens: int) -> int:
    """Blocks of the pool that so many tokens take in a group that frees none."""
    return -(-tokens // (group.entries * block_size))


def held(groups: Groups, block_size: int, length: int, step: int) -> int:
    """The maximum of blocks that a sequence of `length` tokens holds at once while no step computes more than
    `step`."""
    total = 0
    for group in groups:
        whole = covering(group, block_size, length)
        if group.window:  # one more, as neither end is a block's
            whole = min(whole, covering(group, block_size, group.window + TILE + step) + 1)
        total += whole
    return total


def longest(groups: Groups, block_size: int, blocks: int, step: int) -> int:
    """Tokens of the longest sequence that a pool of so many blocks holds; `held` is the other way round."""
    if not all(group.window for group in groups):
        low, high = 0, blocks * block_size * max(group.entries for group in groups)
    else:  # where all free, what fits at all may be endless
        low, high = 0, 1 << 30
    while low < high:
        middle = (low + high + 1) // 2
        if held(groups, block_size, middle, step) <= blocks:
            low = middle
        else:
            high = middle - 1
    return low


def capacity(groups: Groups, block_size: int, blocks: int, length: int) -> int:
    """Tokens that a pool of so many blocks holds, of sequences of `length` tokens while they decode."""
    unit = math.lcm(*(group.entries for group in groups)) * block_size
    whole = -(-length // unit) * unit
    return blocks * whole // held(groups, block_size, whole, 1) if whole else 0
