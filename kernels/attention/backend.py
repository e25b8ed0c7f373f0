"""Inputs of attention's candidates. attention.py chooses among them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ..rope.rope import CurrentKV

LOG2_E = 1.4426950408889634  # kernels compute powers of two: they take scores times this


class AttentionMetadata(Protocol):
    """Attention's view of a batch; rank/model/batch.py explains the fields."""

    slots: Tensor  # read by store_and_attend alone
    block_tables: Tensor
    lengths: Tensor
    query_starts: Tensor
    num_decodes: int
    query_len: int
    query_lens: list[int]
    kv_lens: list[int]
    reach: Tensor | None
    scratch: dict[Any, Any]


@dataclass(slots=True)
class Selection:
    """The tokens that each of a step's T tokens attends to, where an indexer chooses them (indexer.py). To attention a
    token is a sequence that decodes, with a block table of blocks of one token."""

    block_tables: Tensor  # [T, most of one] int32 slots, in the order of positions; any behind `lengths`
    lengths: Tensor  # [T] int32
    kv_lens: list[int]  # lengths on the host, or bounds of them
    scratch: dict[Any, Any] = field(default_factory=dict)
    query_len: int = 1
    reach: Tensor | None = None
    num_decodes: int = field(init=False)
    query_lens: list[int] = field(init=False)
    slots: Tensor = field(init=False)  # unset, as is query_starts: nothing is stored, and there are no prompts
    query_starts: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.num_decodes = len(self.kv_lens)
        self.query_lens = [1] * self.num_decodes

    def keep(self, tokens: Tensor, kv_lens: list[int]) -> Selection:
        """The selection of these tokens [S] int64 alone. kv_lens: how many tokens each of them sees."""
        most = self.block_tables.shape[1]
        return Selection(self.block_tables[tokens], self.lengths[tokens], [min(n, most) for n in kv_lens])

    def __getitem__(self, tokens: slice) -> Selection:
        return Selection(self.block_tables[tokens], self.lengths[tokens], self.kv_lens[tokens])


class AttentionParams(NamedTuple):
    """How a layer weighs its keys."""

    scale: float
    window: int = 0  # a token sees itself and the window - 1 tokens before it; 0: all
    # Scores s become softcap * tanh(s / softcap), before the mask (Gemma 2, arXiv 2408.00118); 0: they stay.
    softcap: float = 0.0
    # [heads] f32: a logit of each head that takes part in its softmax and has no value (gpt-oss; Xiao et al. 2023,
    # arXiv 2309.17453). None: there is none.
    sinks: Tensor | None = None


class Part(NamedTuple):
    """One layer's attention of sequences first:stop of a step: of those that decode, or of those that do not."""

    q: Tensor  # [T, heads, head_dim], all tokens of the step
    keys: Tensor  # [blocks, block_size, kv_heads, head_dim]
    values: Tensor  # [blocks, block_size, kv_heads, value_dim]
    rows: AttentionMetadata  # of the whole step
    params: AttentionParams
    first: int
    stop: int
    out: Tensor  # [T, heads, value_dim], contiguous; these sequences' rows are written
    # Scales of keys and values in e4m3, [blocks, kv_heads, 2, block_size] (rope/fp8_cache.py); where values are the
    # first part of the keys, of that part and of the rest. None: they have q's dtype.
    scales: Tensor | None = None
    current_kv: CurrentKV | None = None  # decoding: the cache does not hold the step's tokens yet, and q is not rotated

    @property
    def table_size(self) -> int:
        """Tokens of a block table's entry."""
        return 1 if isinstance(self.rows, Selection) else self.keys.shape[1]

    @property
    def decodes(self) -> bool:
        """Each of the sequences has query_len tokens, one sequence behind the other from q's first row on."""
        return self.first < self.rows.num_decodes

    @property
    def reach(self) -> Tensor | None:
        """[T] int32, the last token of its sequence that each token attends to; None: each attends up to itself."""
        return None if self.decodes else self.rows.reach

    @property
    def decoding(self) -> tuple[Tensor, Tensor]:
        """The rows of q and `out` of sequences that decode: [stop * query_len, heads, head_dim or value_dim]."""
        tokens = self.stop * self.rows.query_len
        if self.q.shape[0] == tokens:
            return self.q, self.out
        return self.q[:tokens], self.out[:tokens]
