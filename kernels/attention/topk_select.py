"""Chooses each token's best scores on a GPU: topk_select.cu."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import jit
from ..device import device_caps

THREADS = 1024
SHARED_BYTES = 4 * (3 * (2048 + 128) + 2 * 32 + 8)  # counts of digits, of groups of these, and of warps
MOST_SHARED = 99 << 10  # bytes of a block, on any GPU from sm_80 on
MOST_BLOCKS = 8  # of a cluster, wherever clusters are
FEW = 8  # tokens


def choose_blocks(tokens: int, device: torch.device) -> int:
    """Blocks that share a token's scores: a power of two, as many as multiprocessors are for, and of up to FEW tokens
    eight. Of 65536 scores on an H200 16 tokens take 25.7 us by clusters of eight, 20.7 by four."""
    found, blocks, most = device_caps(device), 1, MOST_BLOCKS if tokens <= FEW else MOST_BLOCKS // 2
    while found.has_clusters and blocks < most and 2 * blocks * tokens <= found.num_sms:
        blocks *= 2
    return blocks


def kept_scores(longest: int, blocks: int) -> int:
    """Scores of its share that a block keeps in shared memory; others are read again in each pass."""
    return min(-(-longest // blocks), (MOST_SHARED - SHARED_BYTES) // 4)


def topk_select(
    scores: Tensor, tables: Tensor, seen: Tensor, slots: Tensor, counts: Tensor, query_len: int, block_size: int,
    blocks: int = 0,
) -> None:  # fmt: skip
    """Write slots [T, topk] and counts [T] int32 of the largest of scores [T, most] f32, of equal ones the first, in
    the order of positions.

    seen: [T] int32, how many of its scores are there; where they are no more than topk, all positions are chosen and no
    score is read. tables: [T / query_len, max blocks] int32. blocks: of a token's cluster, chosen unless given.
    """
    tokens, topk = slots.shape
    blocks = blocks or choose_blocks(tokens, scores.device)
    kept = kept_scores(scores.shape[1], blocks)
    kernel = jit.kernel("topk_select", "topk_select", torch.float32, MOST_SHARED, **sizes(blocks))
    kernel(
        (tokens * blocks, 1, 1), THREADS, scores, tables, seen, slots, counts, query_len, topk, scores.stride(0),
        tables.stride(0), block_size, kept, shared=SHARED_BYTES + 4 * kept, cluster=blocks,
    )  # fmt: skip


def sizes(blocks: int) -> dict[str, int]:
    """Compile-time constants of topk_select.cu."""
    return dict(THREADS=THREADS, BLOCKS=blocks, SHARED_BYTES=SHARED_BYTES)
