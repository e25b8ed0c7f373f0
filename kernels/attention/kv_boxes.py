"""TMA boxes for decode.cu and prefill.cu: boxes of a cache's blocks."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .. import jit
from ..device import device_caps

DIMS = range(64, 257, 16)  # head sizes
KV_HEADS = 128  # at most: decode counts for each of them and each sequence


def boxed(q: Tensor, keys: Tensor, kept: torch.dtype) -> bool:
    """Whether TMA can bring q [T, heads, dim], and caches of `kept` like keys [blocks, size, kv_heads, dim]."""
    (_, heads, dim), (_, size, kv_heads, _) = q.shape, keys.shape
    if not q.is_cuda or keys.dtype != kept or q.element_size() != 2 or not _takes(heads, kv_heads, dim, size):
        return False
    aligned = (q.data_ptr() | keys.data_ptr()) % 16 == 0
    row, *inner = q.stride()
    side_by_side = row % 8 == 0 and inner == [dim, 1] and keys.is_contiguous()
    return aligned and side_by_side and device_caps(q.device).has_tma


@functools.cache
def _takes(heads: int, kv_heads: int, dim: int, size: int) -> bool:
    whole = size % 8 == 0  # a box is of one block, and 8 rows are a swizzle
    group = 16 if dim <= 128 else 8  # query heads of a key head; decode has no registers for more
    return dim in DIMS and whole and kv_heads <= KV_HEADS and heads <= group * kv_heads


def tensor_maps(
    keys: Tensor, values: Tensor, boxes: tuple[int, ...], runs: int = 0, run: int = 64
) -> tuple[jit.TensorMap, ...]:
    """TMA maps of keys and of values, for each of `boxes`, tokens of a head; runs and run as jit.TensorMap has them."""
    blocks, size, kv_heads, dim = keys.shape
    width = kv_heads * dim * keys.element_size() // 2  # maps count elements of two bytes
    return _maps(keys.data_ptr(), values.data_ptr(), blocks * size, width, boxes, runs, run)


@functools.lru_cache(1024)
def _maps(
    keys: int, values: int, rows: int, width: int, boxes: tuple[int, ...], runs: int, run: int
) -> tuple[jit.TensorMap, ...]:
    """Once for each layer: the caches stay where they are."""
    return tuple(jit.tensor_map(x, rows, width, box, width, runs, run) for box in boxes for x in (keys, values))
