"""Rows of an embedding table that is split by vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor


def embedding(ids: Tensor, weight: Tensor, start: int = 0, whole: bool = True) -> Tensor:
    """Row ids[t] - start of weight [V, H] for each t: [T, H]. Unless `whole`, an id outside the table gives zeros."""
    return embedding_reference(ids, weight, start, whole)


def embedding_reference(ids: Tensor, weight: Tensor, start: int, whole: bool) -> Tensor:
    if whole:
        return weight.index_select(0, ids)
    local = ids - start
    absent = (local < 0) | (local >= weight.shape[0])
    rows = weight.index_select(0, local.masked_fill_(absent, 0))
    # Filled, not multiplied: the row that stood in may hold anything.
    return torch.masked_fill(rows, absent[:, None], 0)
