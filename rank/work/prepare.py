"""A step's work becomes the tensors that layers read."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..model.batch import Batch
from .rows import Rows, Work
from .upload import Upload


def prepare(
    rows: Rows,
    work: Work,
    last: Tensor,
    caches: list[tuple[Tensor, Tensor]],
    block_size: int,
    upload: Upload,
    narrow: bool = False,
) -> tuple[Batch, Tensor]:
    """The batch of one step, and the rows that are sampled ([S] int64), on the device of `last`.

    last: [max_num_seqs] int64, each row's newest sampled token, where the sampler left it: its id may not have
    reached the host yet. narrow: only the tokens that are sampled are wanted of the last layer.
    """
    row = np.repeat(work.rows, work.counts)
    ids = given_ids(rows, work)
    unknown = ids < 0
    sampled_only = bool(unknown.all())
    arrays = [work.sampled_rows, row if unknown.any() else row[:0], ids[:0] if sampled_only else ids]
    whole = _Draft(rows, work, block_size)
    narrowed = _Draft(rows, work.newest, block_size) if narrow and len(row) > np.count_nonzero(work.samples) else None
    arrays += whole.arrays + (narrowed.arrays if narrowed else [])
    sampled_rows, row_, ids_, *tensors = upload.send(arrays)
    if sampled_only:
        ids_ = last[row_]
    elif unknown.any():
        ids_ = torch.where(ids_ < 0, last[row_], ids_)
    batch = whole.batch(ids_, tensors, caches)
    if narrowed:
        batch.sampled = narrowed.batch(ids_[:0], tensors[len(whole.arrays) :], caches)
    return batch, sampled_rows


class _Draft:
    """A batch on the host."""

    def __init__(self, rows: Rows, work: Work, block_size: int):
        ends = np.cumsum(work.counts)
        query_starts = np.concatenate(([0], ends))
        of_row = np.repeat(np.arange(len(work.rows)), work.counts)  # [T] index into work
        positions = np.arange(len(of_row)) - query_starts[of_row] + work.starts[of_row]
        slots = rows.table[work.rows[of_row], positions // block_size].astype(np.int64) * block_size
        self.work = work
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

    def batch(self, ids: Tensor, tensors: list[Tensor], caches: list[tuple[Tensor, Tensor]]) -> Batch:
        """tensors begin with what has become of `arrays`."""
        positions, slots, tables, lengths, query_starts, sample_at = tensors[: len(self.arrays)]
        return Batch(
            ids=ids,
            positions=positions,
            slots=slots,
            block_tables=tables,
            lengths=lengths,
            query_starts=query_starts,
            sample_at=sample_at,
            num_decodes=self.work.singles,
            query_lens=self.work.counts.tolist(),
            kv_lens=self.lengths.tolist(),
            caches=caches,
        )


def given_ids(rows: Rows, work: Work) -> np.ndarray:
    """[T] int64 token ids where the host knows them, -1 where only the sampler does."""
    ids = np.full(int(work.counts.sum()), -1, np.int64)
    starts = np.cumsum(work.counts) - work.counts
    for i in np.flatnonzero(work.starts < rows.known[work.rows]).tolist():
        row, first, count = int(work.rows[i]), int(work.starts[i]), int(work.counts[i])
        tokens = rows.tokens[row][first : first + count]
        ids[starts[i] : starts[i] + len(tokens)] = tokens
    return ids
