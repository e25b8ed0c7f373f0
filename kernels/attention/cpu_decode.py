"""Steps of one token a sequence on CPUs: cpu_decode.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cpp import ops

MOST_DIM = 512  # as in cpu_decode.cpp


def supports(q: Tensor, keys: Tensor, tables: Tensor) -> bool:
    """q [B, heads, head_dim], keys [blocks, block_size, kv_heads, head_dim]."""
    if q.device.type != "cpu" or not len(q) or q.dtype != keys.dtype or q.shape[2] > MOST_DIM:
        return False
    return q.stride()[1:] == (q.shape[2], 1) and keys.is_contiguous() and tables.stride(1) == 1 and ops.takes(q)


def decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    scale: float,
    window: int,
    cap: float,
) -> Tensor:
    """[B, heads, head_dim]; a sequence of length 0 gives zeros."""
    n, heads, dim = q.shape
    size, kv_heads = keys.shape[1:3]
    out = q.new_empty(q.shape)
    partial = q.new_empty(torch.get_num_threads(), 2, heads // kv_heads, 2 + dim, dtype=torch.float32)
    values_ = (q, keys, values, tables, lengths, out, partial, n, heads, kv_heads, dim, size, tables.stride(0),
               q.stride(0), window, float(scale), float(cap))  # fmt: skip
    ops.run(*((ops.typed("cpu_decode", name, q.dtype), values_) for name in ("decode", "merge")))
    return out
