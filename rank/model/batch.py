"""The tensors of a step that layers read, and the one constructor of them; they are passed down explicitly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
from torch import Tensor

from ...kernels.attention.backend import Selection
from ...kernels.segmented_graph import Borrowed, on_host
from .cache_spec import Caches


class StepArrays(NamedTuple):
    """The part of a Batch that follows from where its sequences stand, of T tokens of B sequences: numpy arrays before
    the upload, tensors behind it."""

    positions: Any  # [T] int64
    slots: Any  # [T] int64
    block_tables: Any  # [B, blocks of the longest] int32
    lengths: Any  # [B] int32
    rows: Any  # [B] int64
    query_starts: Any  # [B + 1] int32
    sample_at: Any  # [S] int64


def step_arrays(
    table: np.ndarray, block_size: int, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, sampled: np.ndarray
) -> StepArrays:
    """The arrays of a step that computes tokens starts[i]:starts[i] + counts[i] of the sequence in each row.

    table: [all rows, most blocks of one] int32. sampled: [B], at how many of its last tokens each sequence samples; or
    bool, whether at the last one.
    """
    ends = np.cumsum(counts)
    query_starts = np.concatenate(([0], ends))
    sequence = np.repeat(np.arange(len(rows)), counts)  # [T]
    positions = np.arange(len(sequence)) - query_starts[sequence] + starts[sequence]
    lengths = starts + counts
    slots, tables = slot_mappings(table, block_size, rows, counts, positions, lengths)
    if sampled.dtype == bool:
        sample_at = (ends - 1)[sampled]
    else:
        behind = np.cumsum(sampled)  # of the sampled tokens, where each sequence's end
        sample_at = np.repeat(ends - behind, sampled) + np.arange(behind[-1] if len(behind) else 0)
    return StepArrays(
        positions, slots, tables, lengths.astype(np.int32), rows, query_starts.astype(np.int32), sample_at
    )  # fmt: skip


def slot_mappings(
    table: np.ndarray, block_size: int, rows: np.ndarray, counts: np.ndarray, positions: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Slots [T] of a step's tokens, at these positions, and block tables [B, blocks of the longest] of its sequences.

    table: as step_arrays has it. rows: [B], the sequences' in it.
    """
    slots = table[np.repeat(rows, counts), positions // block_size].astype(np.int64) * block_size
    max_blocks = int(-(-lengths.max(initial=0) // block_size))
    return slots + positions % block_size, table[rows, :max_blocks]


Mix = Callable[..., Tensor]
Keep = Callable[[Tensor], object]


class EmbeddingOverride(NamedTuple):
    """Embeddings of tokens that are not looked up by their ids, as those of images: equal on all ranks."""

    at: Tensor  # [E] int64 indices into T, none twice
    values: Tensor  # [E, hidden] of the model's dtype, as they enter the first layer
    deeper: Tensor | None = None  # [E, layers, hidden] what is added to these tokens behind each of the first layers


@dataclass(slots=True)
class Batch:
    """T tokens of B sequences. The first `num_decodes` sequences, those that decode, have exactly `query_len` tokens
    each: token j of sequence i is i * query_len + j.

    Attention writes the step's keys and values to `slots` before it reads the cache. So a sequence attends to all its
    `lengths` tokens, including those of this step.
    """

    ids: Tensor  # [T] int64 token ids
    positions: Tensor  # [T] int64; or [axes, T], where rotary embeddings have several axes (M-RoPE)
    slots: Tensor  # [T] int64: block * block_size + offset in the cache
    block_tables: Tensor  # [B, max blocks] int32; unused entries are 0
    lengths: Tensor  # [B] int32: tokens in the cache after this step
    rows: Tensor  # [B] int64: each sequence's entry in caches of whole sequences; -1 fills a captured step up
    query_starts: Tensor  # [B + 1] int32: sequence i has tokens query_starts[i]:query_starts[i + 1]
    sample_at: Tensor  # [S] int64: indices into T of the tokens whose logits are needed, one or several of a sequence
    num_decodes: int
    query_lens: list[int]  # tokens of each sequence in this step and in the cache: query_starts and lengths on the host
    kv_lens: list[int]
    caches: Caches  # per local layer: the tensors that its cache_spec() asks for
    query_len: int = 1
    embeddings: EmbeddingOverride | None = None
    # [T] int32: the last token of its sequence that each attends to; None: each attends up to itself, as those of rows
    # that decode always do.
    reach: Tensor | None = None
    beyond: bool = False  # ids may lie beyond the vocabulary, as tokens that further heads chose (Model.choose)
    layer_inputs: Tensor | None = None  # [T, layers, size]: further embeddings, which the model's embedding leaves here
    # The tokens at sample_at as S sequences of one token each, without ids. The last layer continues with these alone
    # once it has written keys and values. None: it continues with all tokens.
    sampled: Batch | None = None
    # The inputs of a replay, for a step that is captured all but attention and the like; None for other steps.
    replayed: Replayed | None = None
    # The tokens that each token attends to, which a layer with an indexer leaves for the layers behind it without one.
    selection: Selection | None = None
    scratch: dict[Any, Any] = field(default_factory=dict)  # what a kernel computes once for all layers of the step
    # With several cache groups (rank/cache_groups.py): the batch as layers of each but the first read it, with slots,
    # block tables and scratch of its own, and the number of each local layer's group.
    further: list[Batch] = field(default_factory=list)
    layer_groups: Sequence[int] = ()

    def of_layer(self, layer: int) -> Batch:
        """The batch with the slots and block tables of a layer's cache group. layer: its index in this stage."""
        group = self.layer_groups[layer] if self.further else 0
        return self.further[group - 1] if group else self

    def run(self, heads: int, dim: int, mix: Mix, *given: Tensor) -> Tensor:
        """[T, heads * dim] of mix(batch, *given), which mixes a sequence's tokens, of all tokens of the step. Between
        the segments of a captured one it gets the step's batch, its rows of `given`, [T, ...] each, and an `out`
        [T, heads, dim], which it may fill."""
        if self.replayed is not None:
            return self.replayed.mix(heads, dim, mix, *given)
        return mix(self, *given).flatten(1)

    def mix(self, keep: Keep, layer: int, heads: int, dim: int, mix: Mix, *given: Tensor) -> Tensor:
        """`run` of the tokens that go on behind a layer, [S, heads * dim] in the last one, which mix gets as sequences
        of one token each. keep: reduces the residual stream to them."""
        if self.replayed is not None or not self.ends(layer):
            return self.run(heads, dim, mix, *given)
        assert self.sampled is not None
        given = self.reduced(keep, layer, *given)
        return mix(self.sampled, *given).flatten(1) if len(given[0]) else given[0].new_empty(0, heads * dim)

    def ends(self, layer: int) -> bool:
        """Whether only sampled tokens go on behind this layer of the stage."""
        return self.sampled is not None and layer == len(self.caches) - 1

    def reduced(self, keep: Keep, layer: int, *x: Tensor) -> tuple[Tensor, ...]:
        """The rows of each x [T, ...] that go on behind a layer. keep: as of `mix`."""
        if not self.ends(layer):
            return x
        keep(self.sample_at)
        return tuple(one[self.sample_at] for one in x)

    def rows_like(self, out: Sized, x: Tensor) -> Tensor:
        """The rows of x [T, ...] that `out` has: all, or those that are sampled."""
        return x if len(x) == len(out) else x[self.sample_at]

    def add_groups(self, mappings: Iterable[tuple[Tensor, Tensor]], layer_groups: Sequence[int]) -> None:
        """Add cache groups. mappings: slots and block tables of each but the first group."""
        self.layer_groups = layer_groups
        for group, (slots, tables) in enumerate(mappings):
            sampled = None if self.sampled is None else self.sampled.further[group]
            one = replace(self, slots=slots, block_tables=tables, sampled=sampled, scratch={}, further=[])
            self.further.append(one)

    @classmethod
    def of(
        cls, ids: Tensor, arrays: StepArrays, query_lens: list[int], kv_lens: list[int], caches: Caches,
        query_len: int = 1, reach: Tensor | None = None, **optional: Any,
    ) -> Self:  # fmt: skip
        """The batch of these tensors. Sequences with exactly `query_len` tokens, which decode, come first."""
        # A chunk of several tokens that reach beyond themselves may be as long as those that decode.
        decodes = query_lens.count(query_len) if reach is None or query_len == 1 else 0
        return cls(
            ids, *arrays, num_decodes=decodes, query_lens=query_lens, kv_lens=kv_lens, caches=caches,
            query_len=query_len, reach=reach, **optional,
        )  # fmt: skip


class Replayed:
    """The step that is replayed, where what mixes a sequence's tokens is not captured, as attention: it depends on how
    many sequences there are and how long they are, and is launched between the segments of a graph."""

    def __init__(self, most: int):
        """most: tokens of a step."""
        self.most = most
        self.batch: Batch | None = None  # None: no step yet
        self._outs: dict[Any, Tensor] = {}

    def mix(self, heads: int, dim: int, mix: Mix, *given: Tensor) -> Tensor:
        """Batch.run, between two segments. Rows that fill the captured step up keep what earlier steps have left there:
        it is finite, and the results are unused. All layers use the same memory."""
        key = heads, dim, given[0].dtype
        if key not in self._outs:  # not in a capture, whose memory others would get
            self._outs[key] = given[0].new_zeros(self.most, heads, dim)
        tokens = given[0].shape[0]
        out, borrowed = self._outs[key][:tokens], [Borrowed(x) for x in given]

        def run(tokens: int) -> None:
            if self.batch is not None:
                made, to = mix(self.batch, *(x.tensor[:tokens] for x in borrowed), out=out[:tokens]), out[:tokens]
                if made.data_ptr() != to.data_ptr():
                    to.copy_(made.view(to.shape))

        on_host(run, tokens)
        return out.flatten(1)
