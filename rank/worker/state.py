"""The sequence state that every rank keeps between steps: one row a sequence, on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .. import protocol


class Span(NamedTuple):
    """What a step computes of one row."""

    row: int
    start: int  # tokens computed before
    num_tokens: int
    first: int  # place of its first token among the step's
    sampled: int  # the row's index among those that sample; -1: it does not


@dataclass(slots=True)
class ScheduledBatch:
    """What one plan schedules, row by row in the plan's order. Rows with one token come first."""

    rows: np.ndarray  # [B] int64 indices into BatchState
    starts: np.ndarray  # [B] tokens computed before this step
    counts: np.ndarray  # [B] tokens to compute
    samples: np.ndarray  # [B] bool: they include the row's last token, so the step samples the next
    outputs: np.ndarray  # [B] tokens that the row has sampled before this step

    @property
    def sampled_rows(self) -> np.ndarray:
        return self.rows[self.samples]

    @property
    def last_tokens(self) -> ScheduledBatch:
        """The rows that sample, with their last token only."""
        at = np.flatnonzero(self.samples)
        ones = np.ones(len(at), np.int64)
        last = (self.starts + self.counts)[at] - 1
        return ScheduledBatch(self.rows[at], last, ones, ones.astype(bool), self.outputs[at])

    def spans(self) -> list[Span]:
        """Row by row, as Python numbers: for what looks at few rows of few steps."""
        firsts = np.cumsum(self.counts) - self.counts
        sampled = np.where(self.samples, np.cumsum(self.samples) - 1, -1)
        columns = (self.rows, self.starts, self.counts, firsts, sampled)
        return [Span(*one) for one in zip(*(column.tolist() for column in columns), strict=True)]

    def cut(self, at: int) -> tuple[ScheduledBatch, ScheduledBatch]:
        """Split into two microbatches after `at` tokens. A row at the split is in both, like two chunks of a prompt."""
        begins = np.cumsum(self.counts) - self.counts
        before = np.clip(at - begins, 0, self.counts)
        first, second = before > 0, before < self.counts
        samples = self.samples & ~second
        return (
            ScheduledBatch(self.rows[first], self.starts[first], before[first], samples[first], self.outputs[first]),
            ScheduledBatch(
                self.rows[second], (self.starts + before)[second], (self.counts - before)[second],
                self.samples[second], self.outputs[second],
            ),
        )  # fmt: skip

    @property
    def num_decodes(self) -> int:
        """How many rows compute exactly one token."""
        return int(np.count_nonzero(self.counts == 1))


class BatchState:
    """Each row's tokens, lengths and block table. `apply` brings it to the state after the plan's step."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int):
        self.block_size = block_size
        self.table = np.zeros((max_num_seqs, -(-max_model_len // block_size)), np.int32)
        self.num_blocks = np.zeros(max_num_seqs, np.int64)
        self.num_on_device = np.zeros(max_num_seqs, np.int64)  # leading blocks that DeviceDecodeBatch holds
        self.length = np.zeros(max_num_seqs, np.int64)  # sampled tokens included
        self.known = np.zeros(max_num_seqs, np.int64)  # tokens whose ids are in `tokens`
        self.computed = np.zeros(max_num_seqs, np.int64)
        self.prompt_len = np.zeros(max_num_seqs, np.int64)
        self.tokens: list[np.ndarray] = [np.zeros(0, np.int64)] * max_num_seqs

    def apply(self, plan: protocol.Plan) -> ScheduledBatch:
        for sequence in plan.new:
            self._enter(sequence)
        rows, ids = protocol.unpack_u16(plan.block_rows), protocol.unpack_u32(plan.block_ids)
        for row, block in zip(rows, ids, strict=True):
            self.table[row, self.num_blocks[row]] = block
            self.num_blocks[row] += 1
        return self._scheduled_batch(plan)

    def _enter(self, new: protocol.NewSequence) -> None:
        row = new.row
        blocks = np.frombuffer(new.blocks, np.uint32)
        self.tokens[row] = np.frombuffer(new.tokens, np.uint32).astype(np.int64)
        self.length[row] = self.known[row] = len(self.tokens[row])
        self.computed[row] = new.num_computed
        self.prompt_len[row] = new.prompt_len
        self.table[row, : len(blocks)] = blocks
        self.num_blocks[row] = len(blocks)
        self.num_on_device[row] = 0

    def _scheduled_batch(self, plan: protocol.Plan) -> ScheduledBatch:
        rows = np.frombuffer(plan.rows, np.uint16).astype(np.int64)
        counts = np.ones(len(rows), np.int64)
        longer = np.frombuffer(plan.counts, np.uint32)
        if len(longer):
            counts[-len(longer) :] = longer
        starts = self.computed[rows]
        samples = starts + counts == self.length[rows]
        outputs = self.length[rows] - self.prompt_len[rows]
        self.computed[rows] += counts
        self.length[rows] += samples
        return ScheduledBatch(rows, starts, counts, samples, outputs)
