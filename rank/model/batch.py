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
    # Of a step that is captured all but attention and the like: what that reads at a replay. None: of other steps.
    replayed: Replayed | None = None
    scratch: dict[Any, Any] = field(default_factory=dict)  # what a kernel computes once for all layers of the step


class Replayed:
    """The step that is replayed, where what mixes a sequence's tokens is not captured, as attention: it depends on how
    many sequences there are and how long they are, and is launched between the pieces of a graph."""

    def __init__(self, most: int):
        """most: tokens of a step."""
        self.most = most
        self.batch: Batch | None = None  # None: no step yet
        self._outs: dict[Any, Tensor] = {}

    def mix(self, heads: int, dim: int, function: Callable[..., object], *given: Tensor) -> Tensor:
        """[T, heads * dim], which function(*given, batch, out) fills for a step's tokens, between two pieces.

        given: [T, ...]; a step's rows of each are handed on. Rows of `out` that fill the captured step up keep what
        earlier steps have left there: it is finite, and nobody reads what becomes of them. All layers use the same
        memory.
        """
        key = heads, dim, given[0].dtype
        if key not in self._outs:  # not in a capture, whose memory others would get
            self._outs[key] = given[0].new_zeros(self.most, heads, dim)
        tokens = given[0].shape[0]
        out, borrowed = self._outs[key][:tokens], [Borrowed(x) for x in given]

        def run(tokens: int) -> None:
            if self.batch is not None:
                function(*(x.tensor[:tokens] for x in borrowed), self.batch, out[:tokens])

        on_host(run, tokens)
        return out.flatten(1)
