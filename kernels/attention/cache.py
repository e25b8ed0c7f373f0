"""Writing keys and values into the paged cache (the idea: Kwon et al. 2023, arXiv 2309.06180)."""

from __future__ import annotations

from torch import Tensor


def cache_write(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Put k, v [T, kv_heads, head_dim] at `slots` [T] int64 of keys, values [blocks, block_size, kv_heads, head_dim].

    A slot is block * block_size + offset. No slot occurs twice. The cache's dtype may differ from k's.
    """
    cache_write_reference(k, v, keys, values, slots)


def cache_write_reference(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    keys.view(-1, *keys.shape[2:]).index_copy_(0, slots, k.to(keys.dtype))
    values.view(-1, *values.shape[2:]).index_copy_(0, slots, v.to(values.dtype))
