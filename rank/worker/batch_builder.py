"""Builds the tensors that layers read, `Batch`, from a step's ScheduledBatch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..model.batch import Batch
from ..model.cache_spec import Caches
from .state import BatchState, ScheduledBatch
from .upload import Upload

TILE = 128  # rows of a GEMM's tile: microbatches are split at a multiple of it


def build_batches(
    state: BatchState,
    scheduled: ScheduledBatch,
    last: Tensor,
    caches: Caches,
    upload: Upload,
    last_token_only: bool = False,
    min_tokens: int = 0,
) -> tuple[list[Batch], Tensor]:
    """One step's microbatches, one or two, and the rows that are sampled ([S] int64), on the device of `last`.

    last: [max_num_seqs] int64, each row's newest sampled token. The sampler writes it on the device; its id may not
    have reached the host yet. last_token_only: the last layer computes sampled tokens only. min_tokens: a step is split
    into two microbatches where each gets at least so many tokens; 0: steps stay whole.
    """
    row = np.repeat(scheduled.rows, scheduled.counts)
    ids = given_ids(state, scheduled)
    unknown = ids < 0
    sampled_only = bool(unknown.all())
    arrays = [scheduled.sampled_rows, row if unknown.any() else row[:0], ids[:0] if sampled_only else ids]
    at = microbatch_split(state, scheduled, min_tokens) if min_tokens else 0
    parts = scheduled.cut(at) if at else [scheduled]
    batches = [HostBatch(state, part, last_token_only) for part in parts]
    sampled_rows, row_, ids_, *tensors = upload.send([*arrays, *(array for batch in batches for array in batch.arrays)])
    if sampled_only:
        ids_ = last[row_]
    elif unknown.any():
        ids_ = torch.where(ids_ < 0, last[row_], ids_)
    left = iter(tensors)
    pieces = ids_.split([batch.tokens for batch in batches])
    return [batch.batch(piece, left, caches) for batch, piece in zip(batches, pieces, strict=True)], sampled_rows


def microbatch_split(state: BatchState, scheduled: ScheduledBatch, min_tokens: int) -> int:
    """Where to split a step: the number of tokens of its first microbatch, or 0 if it stays whole.

    Each microbatch has at least `min_tokens` tokens. A sequence that the split divides has more than one token in both
    microbatches, because one-token rows must come first in a batch.
    """
    if ((scheduled.counts == 1) & (scheduled.starts < state.known[scheduled.rows])).any():
        # A prompt's single token, which stands among the decoding rows: a later row of the same step may write the
        # prefix-cache blocks that it reads. In the second microbatch that would be too late.
        return 0
    total = int(scheduled.counts.sum())
    at = (total + TILE) // (2 * TILE) * TILE
    ends = np.cumsum(scheduled.counts)
    i = int(np.searchsorted(ends, at))  # the sequence at the split
    begin, end = int(ends[i] - scheduled.counts[i]), int(ends[i])
    if at < end and at == begin + 1:
        at = begin
    elif at == end - 1:
        at = end
    return at if min(at, total - at) >= min_tokens else 0


class BatchArrays(NamedTuple):
    """Of a Batch, the arrays that follow from the sequences' state: T tokens of B rows."""

    positions: np.ndarray  # [T] int64
    slots: np.ndarray  # [T] int64
    tables: np.ndarray  # [B, blocks of the longest] int32
    lengths: np.ndarray  # [B] int32
    rows: np.ndarray  # [B] int64
    query_starts: np.ndarray  # [B + 1] int32
    sample_at: np.ndarray  # [S] int64


def batch_arrays(state: BatchState, scheduled: ScheduledBatch) -> BatchArrays:
    """What every step's batch is made of: of eager steps, those captured in pieces, the profile run, and CPU graphs."""
    block_size = state.block_size
    ends = np.cumsum(scheduled.counts)
    query_starts = np.concatenate(([0], ends))
    of_row = np.repeat(np.arange(len(scheduled.rows)), scheduled.counts)  # [T] index into `scheduled`
    positions = np.arange(len(of_row)) - query_starts[of_row] + scheduled.starts[of_row]
    slots = state.table[scheduled.rows[of_row], positions // block_size].astype(np.int64) * block_size
    lengths = scheduled.starts + scheduled.counts
    most_blocks = int(-(-lengths.max(initial=0) // block_size))
    return BatchArrays(
        positions,
        slots + positions % block_size,
        state.table[scheduled.rows, :most_blocks],
        lengths.astype(np.int32),
        scheduled.rows,
        query_starts.astype(np.int32),
        (ends - 1)[scheduled.samples],
    )


class HostBatch:
    """A Batch as numpy arrays, before the upload."""

    def __init__(self, state: BatchState, scheduled: ScheduledBatch, last_token_only: bool):
        made = batch_arrays(state, scheduled)
        self.scheduled = scheduled
        self.tokens = len(made.positions)
        self.kv_lens: list[int] = made.lengths.tolist()
        self.arrays = [*made]  # in the order in which `batch` reads them
        self.sampled: HostBatch | None = None
        if last_token_only and np.count_nonzero(scheduled.samples) < self.tokens:
            self.sampled = HostBatch(state, scheduled.last_tokens, False)
            self.arrays += self.sampled.arrays

    def batch(self, ids: Tensor, tensors: Iterator[Tensor], caches: Caches) -> Batch:
        """The batch on the device. Consumes the uploaded `arrays` from `tensors`."""
        mine = itertools.islice(tensors, len(BatchArrays._fields))
        positions, slots, tables, lengths, rows, query_starts, sample_at = mine
        return Batch(
            ids=ids,
            positions=positions,
            slots=slots,
            block_tables=tables,
            lengths=lengths,
            rows=rows,
            query_starts=query_starts,
            sample_at=sample_at,
            num_decodes=self.scheduled.num_decodes,
            query_lens=self.scheduled.counts.tolist(),
            kv_lens=self.kv_lens,
            caches=caches,
            sampled=self.sampled.batch(ids[:0], tensors, caches) if self.sampled else None,
        )


def given_ids(state: BatchState, scheduled: ScheduledBatch) -> np.ndarray:
    """[T] int64 token ids. -1: the token was sampled, and its id is on the device only."""
    ids = np.full(int(scheduled.counts.sum()), -1, np.int64)
    starts = np.cumsum(scheduled.counts) - scheduled.counts
    for i in np.flatnonzero(scheduled.starts < state.known[scheduled.rows]).tolist():
        row, first, count = int(scheduled.rows[i]), int(scheduled.starts[i]), int(scheduled.counts[i])
        tokens = state.tokens[row][first : first + count]
        ids[starts[i] : starts[i] + len(tokens)] = tokens
    return ids
