"""What TMA brings to decode.cu and prefill.cu: boxes of a cache's blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import jit
from ..device import device_caps

DIMS = range(64, 257, 16)  # head sizes
KV_HEADS = 128  # at most: decode counts for each of them and each sequence


def boxed(q: Tensor, keys: Tensor, kept: torch.dtype) -> bool:
    """Whether TMA can bring q [T, heads, dim], and caches of `kept` like keys [blocks, size, kv_heads, dim]."""
    size, dim = keys.shape[1], q.shape[2]
    if not q.is_cuda or not device_caps(q.device).has_tma or q.element_size() != 2 or keys.dtype != kept:
        return False
    whole = size % 8 == 0  # a box is of one block, and 8 rows are a swizzle
    aligned = all(x.data_ptr() % 16 == 0 for x in (q, keys)) and q.stride(0) % 8 == 0
    side_by_side = q.stride()[1:] == (dim, 1) and keys.is_contiguous()
    group = 16 if dim <= 128 else 8  # query heads of a key head; decode has no registers for more
    fits = keys.shape[2] <= KV_HEADS and q.shape[1] <= group * keys.shape[2]
    return dim in DIMS and whole and aligned and side_by_side and fits


def tensor_maps(
    keys: Tensor, values: Tensor, box: int, runs: int = 0, run: int = 64
) -> tuple[jit.TensorMap, jit.TensorMap]:
    """Of keys and of values: boxes of `box` tokens of a head; runs and run as jit.TensorMap has them."""
    blocks, size, kv_heads, dim = keys.shape
    width = kv_heads * dim * keys.element_size() // 2  # maps count elements of two bytes
    of_k, of_v = (jit.tensor_map(x.data_ptr(), blocks * size, width, box, width, runs, run) for x in (keys, values))
    return of_k, of_v
