"""The sequence state that every rank keeps between steps: one row a sequence, on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .. import protocol
from ..cache_groups import ONE_GROUP, Groups

# The positions of a prompt's tokens on each axis, [axes, tokens] int64, by its length and the images in it.
ImagePositions = Callable[[int, Sequence[protocol.Picture]], np.ndarray]


class Span(NamedTuple):
    """The work of a step for one row."""

    row: int
    start: int  # tokens computed before
    num_tokens: int
    first: int  # place of its first token among the step's
    sampled: int  # index of the row's last sampled token among the step's; -1: it samples none


@dataclass(slots=True)
class ScheduledBatch:
    """The work of one plan, row by row in the plan's order. Rows that decode, with `query_len` tokens, come first.

    A row that samples does so at its last token, and one that decodes at each of its tokens.
    """

    rows: np.ndarray  # [B] int64 indices into BatchState
    starts: np.ndarray  # [B] tokens computed before this step
    counts: np.ndarray  # [B] tokens to compute
    samples: np.ndarray  # [B] bool: they include the row's last token, so the step samples the next
    outputs: np.ndarray  # [B] tokens that the row has sampled before this step
    query_len: int = 1
    # [D, query_len - 1] int64 of the first rows, behind their newest token; protocol.NO_DRAFT fills them up, and MADE
    # stands for those that the ranks have kept. None: all tokens are known, and rows of exactly query_len tokens are
    # those that decode.
    drafts: np.ndarray | None = None

    @property
    def verified(self) -> int:
        """How many rows, the first ones, decode query_len tokens."""
        return self.num_decodes if self.drafts is None else len(self.drafts)

    @property
    def sampled(self) -> np.ndarray:
        """[B] at how many of its last tokens each row samples; bool where that is one at most."""
        if self.query_len == 1:
            return self.samples
        return self.samples * np.where(np.arange(len(self.rows)) < self.verified, self.query_len, 1)

    @property
    def sampled_rows(self) -> np.ndarray:
        """[S] the row of each sampled token."""
        return self.rows[self.samples] if self.query_len == 1 else np.repeat(self.rows, self.sampled)

    @property
    def sampled_outputs(self) -> np.ndarray:
        """[S] the number of tokens that a sampled token's row has sampled before it."""
        return self.outputs[self.samples] if self.query_len == 1 else self.sampled_tokens.outputs

    @property
    def newest_sampled(self) -> np.ndarray | None:
        """Indices of rows' last sampled tokens among the sampled ones; None: each row samples one at most."""
        return None if self.query_len == 1 else np.cumsum(self.sampled)[self.samples] - 1

    @property
    def sampled_tokens(self) -> ScheduledBatch:
        """The sampled tokens, as rows of one token each."""
        sampled = self.sampled.astype(np.int64)
        ends = np.cumsum(sampled)
        ones = np.ones(ends[-1] if len(ends) else 0, np.int64)
        place = np.arange(len(ones)) - np.repeat(ends - sampled, sampled)  # among its row's sampled tokens
        firsts, outputs = (np.repeat(x, sampled) for x in (self.starts + self.counts - sampled, self.outputs))
        return ScheduledBatch(self.sampled_rows, firsts + place, ones, ones.astype(bool), outputs + place)

    def spans(self) -> list[Span]:
        """Row by row, as Python numbers: for what looks at few rows of few steps."""
        firsts = np.cumsum(self.counts) - self.counts
        sampled = np.where(self.samples, np.cumsum(self.sampled) - 1, -1)
        columns = (self.rows, self.starts, self.counts, firsts, sampled)
        return [Span(*one) for one in zip(*(column.tolist() for column in columns), strict=True)]

    def cut(self, at: int) -> tuple[ScheduledBatch, ScheduledBatch]:
        """Split into two microbatches after `at` tokens. A row at the split is in both, like two chunks of a prompt."""
        begins = np.cumsum(self.counts) - self.counts
        before = np.clip(at - begins, 0, self.counts)
        first, second = before > 0, before < self.counts
        samples = self.samples & ~second
        drafts = [None, None] if self.drafts is None else [self.drafts[x[: len(self.drafts)]] for x in (first, second)]
        return (
            ScheduledBatch(
                self.rows[first], self.starts[first], before[first], samples[first], self.outputs[first],
                self.query_len, drafts[0],
            ),
            ScheduledBatch(
                self.rows[second], (self.starts + before)[second], (self.counts - before)[second],
                self.samples[second], self.outputs[second], self.query_len, drafts[1],
            ),
        )  # fmt: skip

    @property
    def num_decodes(self) -> int:
        """How many rows compute exactly query_len tokens."""
        return int(np.count_nonzero(self.counts == self.query_len))

    @property
    def all_decode(self) -> bool:
        """Whether all rows decode, and sample: what graphs of decode steps compute."""
        return self.verified == len(self.rows) and bool(self.samples.all())


class BatchState:
    """Each row's tokens, lengths and block tables. `apply` brings it to the state after the plan's step.

    With several cache groups (rank/cache_groups.py) tables stand below one another: row r's of group g is the
    g * rows + r-th. `rows_of` finds them.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        groups: Groups = ONE_GROUP,
        layer_groups: Sequence[int] = (),
        pool: int = 0,
    ):
        """layer_groups: the number of each local layer's group; only read where there are several. pool: blocks of the
        cache; only read where blocks have several entries."""
        self.block_size = block_size
        self.groups = groups
        self.layer_groups = layer_groups
        self._entries = [np.arange(group.entries, dtype=np.int64) * pool for group in groups]
        self._single = all(len(entries) == 1 for entries in self._entries)
        unit = math.lcm(*(group.entries for group in groups))
        tables = len(groups) * max_num_seqs
        self.table = np.zeros((tables, -(-max_model_len // (block_size * unit)) * unit), np.int32)
        self.num_blocks = np.zeros(tables, np.int64)  # entries of each table
        self.num_on_device = np.zeros(tables, np.int64)  # of these, leading ones that DeviceDecodeBatch holds
        self.length = np.zeros(max_num_seqs, np.int64)  # sampled tokens included
        self.known = np.zeros(max_num_seqs, np.int64)  # tokens whose ids are in `tokens`
        self.computed = np.zeros(max_num_seqs, np.int64)
        self.prompt_len = np.zeros(max_num_seqs, np.int64)
        self.tokens: list[np.ndarray] = [np.zeros(0, np.int64)] * max_num_seqs
        # How images move the positions that rotary embeddings read, of models with several axes. `axes` has those of
        # prompts with images, [axes, prompt tokens]; tokens behind them stand at their index plus `shift` on all axes.
        self.image_positions: ImagePositions | None = None
        self.axes: dict[int, np.ndarray] = {}  # by row
        self.shift = np.zeros(max_num_seqs, np.int64)
        self.spans: dict[int, list[tuple[int, int]]] = {}  # by row: (first, end) of tokens that attend to each other

    def rows_of(self, rows: np.ndarray, group: int) -> np.ndarray:
        """Indices of these rows' block tables of a cache group in `table`."""
        return rows + group * len(self.length) if group else rows

    def apply(self, plan: protocol.Plan) -> ScheduledBatch:
        if plan.rejected:
            rejected = np.frombuffer(plan.rejected, np.uint16).astype(np.int64)
            self.length[rejected[::2]] -= rejected[1::2]
            self.computed[rejected[::2]] -= rejected[1::2]
        for row in protocol.unpack_u16(plan.freed) if self.axes or self.spans else ():
            self._forget_images(row)
        for row in [row for row, spans in self.spans.items() if self.computed[row] >= spans[-1][1]]:
            del self.spans[row]
        for sequence in plan.new:
            self._enter(sequence)
        rows, ids = protocol.unpack_u16(plan.block_rows), protocol.unpack_u32(plan.block_ids)
        for row, block in zip(rows, ids, strict=True):
            if self._single:
                self.table[row, self.num_blocks[row]] = block
                self.num_blocks[row] += 1
            else:
                entries, first = self._entries[row // len(self.length)], self.num_blocks[row]
                self.table[row, first : first + len(entries)] = entries + block
                self.num_blocks[row] += len(entries)
        return self._scheduled_batch(plan)

    def _enter(self, new: protocol.NewSequence) -> None:
        row = new.row
        self.tokens[row] = np.frombuffer(new.tokens, np.uint32).astype(np.int64)
        self.length[row] = self.known[row] = len(self.tokens[row])
        self.computed[row] = new.num_computed
        self.prompt_len[row] = new.prompt_len
        self._forget_images(row)
        if spans := [span for picture in new.pictures for span in picture.spans if span[1] > new.num_computed]:
            self.spans[row] = spans
        if new.pictures and self.image_positions is not None:
            self.axes[row] = axes = self.image_positions(new.prompt_len, new.pictures)
            self.shift[row] = axes[:, -1].max() + 1 - new.prompt_len
        for group, packed in enumerate((new.blocks, *new.further_blocks)):
            self._fill(group * len(self.length) + row, np.frombuffer(packed, np.uint32))

    def _forget_images(self, row: int) -> None:
        self.spans.pop(row, None)
        if self.axes.pop(row, None) is not None:
            self.shift[row] = 0

    def _fill(self, table: int, blocks: np.ndarray) -> None:
        """Let a table have these blocks of the pool alone."""
        found = (blocks[:, None] + self._entries[table // len(self.length)]).ravel()
        self.table[table, : len(found)] = found
        self.num_blocks[table] = len(found)
        self.num_on_device[table] = 0

    def _scheduled_batch(self, plan: protocol.Plan) -> ScheduledBatch:
        rows = np.frombuffer(plan.rows, np.uint16).astype(np.int64)
        counts = np.ones(len(rows), np.int64)
        longer = np.frombuffer(plan.counts, np.uint32)
        if len(longer):
            counts[-len(longer) :] = longer
        starts = self.computed[rows]
        samples = starts + counts == self.length[rows]
        outputs = self.length[rows] - self.prompt_len[rows]
        if plan.query_len == 1:
            self.computed[rows] += counts
            self.length[rows] += samples
            return ScheduledBatch(rows, starts, counts, samples, outputs)
        drafts = np.frombuffer(plan.drafts, np.int32).astype(np.int64).reshape(-1, plan.query_len - 1)
        counts[: len(drafts)], samples[: len(drafts)] = plan.query_len, True
        scheduled = ScheduledBatch(rows, starts, counts, samples, outputs, plan.query_len, drafts)
        self.computed[rows] += counts
        self.length[rows] += scheduled.sampled  # as if all drafts stood: a later plan says which were rejected
        return scheduled
