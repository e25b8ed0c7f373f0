"""Attention of prompts over the paged cache where asynchronous tensor-core instructions are: cuda/prompt.cu."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from . import jit

ROWS, TILE = 128, 64  # of queries that a block takes at once, and of keys
STAGES = {64: 8, 128: 6}  # tiles of keys, and as many of values, that lie in shared memory, by head size
LOG2_E = 1.4426950408889634


def suits(q: Tensor, keys: Tensor) -> bool:
    """Whether `attend` takes q [T, heads, dim] and caches like keys [blocks, size, kv_heads, dim]."""
    size, dim = keys.shape[1], q.shape[2]
    if not q.is_cuda or not _hopper(q.device) or q.element_size() != 2 or q.dtype != keys.dtype or dim not in STAGES:
        return False
    boxes = size % TILE == 0 or (TILE % size == 0 and size >= 8)
    aligned = all(x.data_ptr() % 16 == 0 for x in (q, keys)) and q.stride(0) % 8 == 0
    return boxes and aligned and q.stride()[1:] == (dim, 1) and keys.is_contiguous()


@functools.cache
def _hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)  # no other generation has these instructions


def work(query_lens: list[int], kv_lens: list[int], first: int, stop: int) -> np.ndarray:
    """What blocks take one by one, the longest first: [n, 8] int32 of sequence, first row, rows, position, length.

    Of sequences first:stop, whose query_lens[i] newest tokens of kv_lens[i] are in the step, row after row.
    """
    items = []
    row = sum(query_lens[:first])
    for i in range(first, stop):
        count, length = query_lens[i], kv_lens[i]
        for at in range(0, count, ROWS):
            items.append((i, row + at, min(ROWS, count - at), length - count + at, length, 0, 0, 0))
        row += count
    items.sort(key=lambda item: -(item[2] + item[3]))
    return np.array(items, np.int32)


def attend(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, items: Tensor, out: Tensor,
    scale: float, window: int, cap: float,
) -> None:  # fmt: skip
    """The rows of `items`, which is work() on the device; q and out [T, heads, dim], out contiguous."""
    (rows, heads, dim), (blocks, size, kv_heads, _) = q.shape, keys.shape
    stages, box = STAGES[dim], min(size, TILE)
    shared = 1024 + (ROWS + 2 * stages * TILE) * dim * 2
    kernel = jit.kernel(
        "prompt", "prompt", q.dtype, shared, HEADS=heads, KV_HEADS=kv_heads, DIM=dim, SIZE=size, BOX=box, STAGES=stages,
        WINDOW=window, CAPPED=int(cap > 0),
    )  # fmt: skip
    of_q = jit.boxes(q.data_ptr(), rows, heads * dim, ROWS, q.stride(0))
    of_k, of_v = (jit.boxes(x.data_ptr(), blocks * size, kv_heads * dim, box, kv_heads * dim) for x in (keys, values))
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    grid = min(processors, len(items) * heads)
    kernel(
        (grid, 1, 1), 384, of_q, of_k, of_v, items, len(items), tables, tables.stride(0), out, scale * LOG2_E,
        float(cap), shared=shared,
    )  # fmt: skip
