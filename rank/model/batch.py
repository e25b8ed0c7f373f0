"""The tensors of one step that layers read. Made by work/prepare.py, passed down explicitly."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(slots=True)
class Batch:
    """T tokens of B sequences. The first `num_decodes` sequences have exactly one token each.

    Keys and values of this step are written to `slots` before attention reads the cache, so a sequence attends to
    all its `lengths` tokens, those of this step included.
    """

    ids: Tensor  # [T] int64 token ids
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64: block * block_size + offset in the cache
    block_tables: Tensor  # [B, most blocks] int32; unused entries are 0
    lengths: Tensor  # [B] int32: tokens in the cache after this step
    query_starts: Tensor  # [B + 1] int32: sequence i has tokens query_starts[i]:query_starts[i + 1]
    sample_at: Tensor  # [S] int64: indices into T whose logits are wanted
    num_decodes: int
    query_lens: list[int]  # the same as query_starts and lengths, on the host
    kv_lens: list[int]
    caches: list[tuple[Tensor, Tensor]]  # per local layer: keys, values [blocks, block_size, kv_heads, head_dim]
    # The rows at sample_at as S sequences of one token each, without ids: all that goes on in the last layer once its
    # keys and values are written. None: all rows go on.
    sampled: Batch | None = None
    scratch: dict[str, Any] = field(default_factory=dict)  # what a kernel works out once for all layers of the step
