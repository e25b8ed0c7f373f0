"""Chooses each token's best scores on a GPU: topk_select.cu."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import jit

THREADS = 1024


def topk_select(
    scores: Tensor, tables: Tensor, seen: Tensor, slots: Tensor, counts: Tensor, query_len: int, block_size: int
) -> None:
    """Write slots [T, topk] and counts [T] int32 of the largest of scores [T, most] f32, of equal ones the first, in
    the order of positions.

    seen: [T] int32, how many of its scores are there; where they are no more than topk, all positions are chosen and no
    score is read. tables: [T / query_len, max blocks] int32.
    """
    kernel = jit.kernel("topk_select", "topk_select", torch.float32, THREADS=THREADS)
    kernel(
        (len(slots), 1, 1), THREADS, scores, tables, seen, slots, counts, query_len, slots.shape[1], scores.stride(0),
        tables.stride(0), block_size,
    )  # fmt: skip
