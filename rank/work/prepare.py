"""A step's work becomes the tensors that layers read."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..model.batch import Batch
from .rows import Rows, Work
from .upload import Upload


def prepare(
    rows: Rows, work: Work, last: Tensor, caches: list[tuple[Tensor, Tensor]], block_size: int, upload: Upload
) -> tuple[Batch, Tensor]:
    """The batch of one step, and the rows that are sampled ([S] int64), on the device of `last`.

    last: [max_num_seqs] int64, each row's newest sampled token, where the sampler left it: its id may not have
    reached the host yet.
    """
    ends = np.cumsum(work.counts)
    query_starts = np.concatenate(([0], ends))
    of_row = np.repeat(np.arange(len(work.rows)), work.counts)  # [T] index into work
    positions = np.arange(len(of_row)) - query_starts[of_row] + work.starts[of_row]
    row = work.rows[of_row]
    slots = rows.table[row, positions // block_size].astype(np.int64) * block_size + positions % block_size
    lengths = work.starts + work.counts
    most_blocks = int(-(-lengths.max() // block_size))
    ids = given_ids(rows, work)
    unknown = ids < 0
    sampled_only = bool(unknown.all())
    arrays = [
        positions,
        slots,
        rows.table[work.rows, :most_blocks],
        lengths.astype(np.int32),
        query_starts.astype(np.int32),
        (ends - 1)[work.samples],
        work.sampled_rows,
        row if unknown.any() else row[:0],
        ids[:0] if sampled_only else ids,
    ]
    positions_, slots_, tables, lengths_, starts, sample_at, sampled_rows, row_, ids_ = upload.send(arrays)
    if sampled_only:
        ids_ = last[row_]
    elif unknown.any():
        ids_ = torch.where(ids_ < 0, last[row_], ids_)
    batch = Batch(
        ids=ids_,
        positions=positions_,
        slots=slots_,
        block_tables=tables,
        lengths=lengths_,
        query_starts=starts,
        sample_at=sample_at,
        num_decodes=work.singles,
        max_query=int(work.counts.max()),
        max_length=int(lengths.max()),
        query_lens=work.counts.tolist(),
        kv_lens=lengths.tolist(),
        caches=caches,
    )
    return batch, sampled_rows


def given_ids(rows: Rows, work: Work) -> np.ndarray:
    """[T] int64 token ids where the host knows them, -1 where only the sampler does."""
    ids = np.full(int(work.counts.sum()), -1, np.int64)
    starts = np.cumsum(work.counts) - work.counts
    for i in np.flatnonzero(work.starts < rows.known[work.rows]).tolist():
        row, first, count = int(work.rows[i]), int(work.starts[i]), int(work.counts[i])
        tokens = rows.tokens[row][first : first + count]
        ids[starts[i] : starts[i] + len(tokens)] = tokens
    return ids
