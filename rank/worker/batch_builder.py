"""A step's work becomes the tensors that layers read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ..model.batch import Batch
from .state import BatchState, ScheduledBatch
from .upload import Upload

TILE = 128  # rows that a block of a product computes


def build_batches(
    rows: BatchState,
    work: ScheduledBatch,
    last: Tensor,
    caches: list[tuple[Tensor, Tensor]],
    block_size: int,
    upload: Upload,
    last_token_only: bool = False,
    least: int = 0,
) -> tuple[list[Batch], Tensor]:
    """The parts of one step, and the rows that are sampled ([S] int64), on the device of `last`.

    last: [max_num_seqs] int64, each row's newest sampled token, where the sampler left it: its id may not have
    reached the host yet. narrow: only the tokens that are sampled are wanted of the last layer. least: tokens of each
    of the two parts that a step is cut into where it has as many; 0: it stays whole.
    """
    row = np.repeat(work.rows, work.counts)
    ids = given_ids(rows, work)
    unknown = ids < 0
    sampled_only = bool(unknown.all())
    arrays = [work.sampled_rows, row if unknown.any() else row[:0], ids[:0] if sampled_only else ids]
    at = microbatch_split(rows, work, least) if least else 0
    drafts = [_HostBatch(rows, part, block_size, last_token_only) for part in (work.cut(at) if at else [work])]
    sampled_rows, row_, ids_, *tensors = upload.send([*arrays, *(array for draft in drafts for array in draft.arrays)])
    if sampled_only:
        ids_ = last[row_]
    elif unknown.any():
        ids_ = torch.where(ids_ < 0, last[row_], ids_)
    left = iter(tensors)
    pieces = ids_.split([draft.tokens for draft in drafts])
    return [draft.batch(piece, left, caches) for draft, piece in zip(drafts, pieces, strict=True)], sampled_rows


def microbatch_split(rows: BatchState, work: ScheduledBatch, least: int) -> int:
    """How many tokens of a step go to the first of two parts, each of at least `least`; 0: they stay together.

    A divided sequence leaves more than one token in both, as single tokens have to come first in a batch.
    """
    if ((work.counts == 1) & (work.starts < rows.known[work.rows])).any():
        # A row that comes first for its one token, but does not decode: what it has of the prefix cache may be
        # written by a later row of the same step, and so after the first part has read it.
        return 0
    total = int(work.counts.sum())
    at = (total + TILE) // (2 * TILE) * TILE
    ends = np.cumsum(work.counts)
    i = int(np.searchsorted(ends, at))  # the sequence whose token is the last before the cut, if there is any
    begin, end = int(ends[i] - work.counts[i]), int(ends[i])
    if at < end and at == begin + 1:
        at = begin
    elif at == end - 1:
        at = end
    return at if min(at, total - at) >= least else 0


class _HostBatch:
    """A batch on the host."""

    def __init__(self, rows: BatchState, work: ScheduledBatch, block_size: int, last_token_only: bool):
        ends = np.cumsum(work.counts)
        query_starts = np.concatenate(([0], ends))
        of_row = np.repeat(np.arange(len(work.rows)), work.counts)  # [T] index into work
        positions = np.arange(len(of_row)) - query_starts[of_row] + work.starts[of_row]
        slots = rows.table[work.rows[of_row], positions // block_size].astype(np.int64) * block_size
        self.work = work
        self.tokens = len(positions)
        self.lengths = work.starts + work.counts
        most_blocks = int(-(-self.lengths.max(initial=0) // block_size))
        self.arrays = [
            positions,
            slots + positions % block_size,
            rows.table[work.rows, :most_blocks],
            self.lengths.astype(np.int32),
            query_starts.astype(np.int32),
            (ends - 1)[work.samples],
        ]
        self.sampled: _HostBatch | None = None
        if last_token_only and np.count_nonzero(work.samples) < self.tokens:
            self.sampled = _HostBatch(rows, work.last_tokens, block_size, False)
            self.arrays += self.sampled.arrays

    def batch(self, ids: Tensor, tensors: Iterator[Tensor], caches: list[tuple[Tensor, Tensor]]) -> Batch:
        """Takes from `tensors` what has become of `arrays`."""
        positions, slots, tables, lengths, query_starts, sample_at = itertools.islice(tensors, 6)
        return Batch(
            ids=ids,
            positions=positions,
            slots=slots,
            block_tables=tables,
            lengths=lengths,
            query_starts=query_starts,
            sample_at=sample_at,
            num_decodes=self.work.num_decodes,
            query_lens=self.work.counts.tolist(),
            kv_lens=self.lengths.tolist(),
            caches=caches,
            sampled=self.sampled.batch(ids[:0], tensors, caches) if self.sampled else None,
        )


def given_ids(rows: BatchState, work: ScheduledBatch) -> np.ndarray:
    """[T] int64 token ids where the host knows them, -1 where only the sampler does."""
    ids = np.full(int(work.counts.sum()), -1, np.int64)
    starts = np.cumsum(work.counts) - work.counts
    for i in np.flatnonzero(work.starts < rows.known[work.rows]).tolist():
        row, first, count = int(work.rows[i]), int(work.starts[i]), int(work.counts[i])
        tokens = rows.tokens[row][first : first + count]
        ids[starts[i] : starts[i] + len(tokens)] = tokens
    return ids
