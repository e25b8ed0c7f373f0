"""The tensors of a step that layers read. rank/worker/batch_builder.py makes them; they are passed down explicitly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ...kernels.graph_pieces import Borrowed, on_host
from .cache_spec import Caches


@dataclass(slots=True)
class Batch:
    """T tokens of B sequences. The first `num_decodes` sequences have exactly one token each.

    Attention writes the step's keys and values to `slots` before it reads the cache. So a sequence attends to all its
    `lengths` tokens, including those of this step.
    """

    ids: Tensor  # [T] int64 token ids
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64: block * block_size + offset in the cache
    block_tables: Tensor  # [B, most blocks] int32; unused entries are 0
    lengths: Tensor  # [B] int32: tokens in the cache after this step
    rows: Tensor  # [B] int64: each sequence's entry in caches of whole sequences; -1 fills a captured step up
    query_starts: Tensor  # [B + 1] int32: sequence i has tokens query_starts[i]:query_starts[i + 1]
    sample_at: Tensor  # [S] int64: indices into T of the tokens whose logits are needed
    num_decodes: int
    query_lens: list[int]  # tokens of each sequence in this step and in the cache: query_starts and lengths on the host
    kv_lens: list[int]
    caches: Caches  # per local layer: the tensors that its cache_spec() asks for
    # The tokens at sample_at as S sequences of one token each, without ids. The last layer continues with these alone
    # once it has written keys and values. None: it continues with all tokens.
    sampled: Batch | None = None
    # Of a step that is captured all but attention: what that reads at a replay. None: all is captured, or nothing.
    replayed: Replayed | None = None
    scratch: dict[Any, Any] = field(default_factory=dict)  # what a kernel computes once for all layers of the step


class Replayed:
    """The step that is replayed, where all is captured but attention: that depends on how many sequences there are and
    how long they are, and is launched between the pieces of a graph."""

    def __init__(self, most: int):
        """most: tokens of a step."""
        self.most = most
        self.batch: Batch | None = None  # None: no step yet
        self._outs: dict[Any, Tensor] = {}

    def attend(
        self, q: Tensor, heads: int, value_dim: int, attention: Callable[[Tensor, Batch, Tensor], object]
    ) -> Tensor:
        """[T, heads * value_dim], which attention(q, batch, out) fills for a step's tokens, between two pieces.

        Rows that fill the captured step up keep what earlier steps have left there: it is finite, and nobody reads what
        becomes of them. All layers use the same memory.
        """
        key = heads, value_dim, q.dtype
        if key not in self._outs:  # not in a capture, whose memory others would get
            self._outs[key] = q.new_zeros(self.most, heads, value_dim)
        out, given = self._outs[key][: len(q)], Borrowed(q)

        def run(tokens: int) -> None:
            if self.batch is not None:
                attention(given.tensor[:tokens], self.batch, out[:tokens])

        on_host(run, len(q))
        return out.flatten(1)
