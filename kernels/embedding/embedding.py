"""Rows of an embedding table that is split by vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import jit
from ..cpp import ops

THREADS = 512  # of a block at most


def embedding(
    ids: Tensor, weight: Tensor, start: int = 0, whole: bool = True, scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Row ids[t] - start of weight [V, H] for each t, times scale in f32: [T, H]. An id outside the table gives zeros:
    on GPUs always, as rows that fill a captured batch up have id -1, on CPUs unless the table is `whole`.

    dtype: of what is returned; None: the table's. On CPUs f32 of a table of 16 bits alone.
    """
    if ids.is_cuda:
        return embedding_cuda(ids, weight, start, scale)
    made = dtype or weight.dtype
    if ids.is_contiguous() and ops.reads(weight) and (made == torch.float32 or ops.takes(weight)):
        return embedding_cpu(ids, weight, start, scale, made)
    return embedding_reference(ids, weight, start, whole, scale, made)


def embedding_reference(
    ids: Tensor, weight: Tensor, start: int, whole: bool, scale: float = 1.0, dtype: torch.dtype | None = None
) -> Tensor:
    rows, made = _rows(ids, weight, start, whole), dtype or weight.dtype
    return rows.to(made) if scale == 1.0 else rows.float().mul_(scale).to(made)


def _rows(ids: Tensor, weight: Tensor, start: int, whole: bool) -> Tensor:
    if whole:
        return weight.index_select(0, ids)
    local = ids - start
    absent = (local < 0) | (local >= weight.shape[0])
    rows = weight.index_select(0, local.masked_fill_(absent, 0))
    # Filled, not multiplied: the row that stood in may hold anything.
    return torch.masked_fill(rows, absent[:, None], 0)


def embedding_cpu(ids: Tensor, weight: Tensor, start: int, scale: float, dtype: torch.dtype) -> Tensor:
    """An id outside the table gives zeros."""
    rows, width = weight.shape
    out = weight.new_empty(len(ids), width, dtype=dtype)
    sizes = len(ids), width, start, rows
    name = "embed" if dtype == weight.dtype else "embed_f32_of"
    ops.typed("embedding", name, weight.dtype)(ids, weight, out, *sizes, float(scale))
    return out


def embedding_cuda(ids: Tensor, weight: Tensor, start: int, scale: float) -> Tensor:
    """weight: on the GPU, or pinned in host memory. An id outside the table gives zeros."""
    rows, width = weight.shape
    out = ids.new_empty(len(ids), width, dtype=weight.dtype)
    vector = jit.vector(weight, width)
    kernel = jit.kernel("embedding", "embed", weight.dtype, V=vector)
    blocks = -(-width // (vector * THREADS))
    threads = -(-width // (vector * blocks * 32)) * 32
    kernel((len(ids), blocks, 1), threads, ids, weight, out, width, start, rows, float(scale))
    return out
