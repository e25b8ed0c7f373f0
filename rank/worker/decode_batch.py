"""Batches of decode steps that are captured: their tensors stay where they are and are filled anew for each step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...kernels.sampling.decode_inputs import COLUMNS, decode_inputs, empty
from ..model.batch import Batch
from ..model.cache_spec import Caches
from .batch_builder import batch_arrays, given_ids
from .state import BatchState, ScheduledBatch
from .upload import Upload


class DecodeBatch:
    """The inputs of steps of up to `most` sequences with one token each."""

    def __init__(self, state: BatchState, last: Tensor, caches: Caches, most: int):
        """last: [max_num_seqs] int64, each row's newest token."""
        self.state, self.last, self.caches = state, last, caches
        self.inputs = empty(most, state.table.shape[1], last.device)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=last.device)

    def batch(self, size: int, kv_lens: list[int]) -> Batch:
        """The first `size` sequences. kv_lens: their lengths, by which kernels are chosen."""
        ids, positions, slots, rows, lengths, tables = self.inputs
        return Batch(
            ids=ids[:size],
            positions=positions[:size],
            slots=slots[:size],
            block_tables=tables[:size],
            lengths=lengths[:size],
            rows=rows[:size],
            query_starts=self._starts[: size + 1],
            sample_at=ids[:0],
            num_decodes=size,
            query_lens=[1] * size,
            kv_lens=kv_lens,
            caches=self.caches,
        )


class HostDecodeBatch(DecodeBatch):
    """Of a CPU: what eager steps have, in tensors that stay."""

    def fill(self, scheduled: ScheduledBatch) -> None:
        ids, positions, slots, rows, lengths, tables = (x.numpy() for x in self.inputs)
        n, given, made = len(scheduled.rows), given_ids(self.state, scheduled), batch_arrays(self.state, scheduled)
        ids[:n] = np.where(given < 0, self.last.numpy()[made.rows], given)
        positions[:n], slots[:n], rows[:n], lengths[:n] = made.positions, made.slots, made.rows, made.lengths
        tables[:n, : made.tables.shape[1]] = made.tables


class DeviceDecodeBatch(DecodeBatch):
    """Of a GPU, which keeps the rows' block tables: a step sends the blocks that are new to it."""

    def __init__(self, state: BatchState, last: Tensor, caches: Caches, most: int, upload: Upload):
        super().__init__(state, last, caches, most)
        self.upload = upload
        self._table = torch.zeros(state.table.shape, dtype=torch.int32, device=last.device)
        self._sent = torch.zeros(1 + most * (COLUMNS + state.table.shape[1]), dtype=torch.int32, device=last.device)

    def send(self, scheduled: ScheduledBatch) -> Tensor:
        """What `fill` reads. Returns the rows, [B] int32 on the device, valid until the next step is sent."""
        state, rows = self.state, scheduled.rows
        held, blocks = state.num_on_device[rows], state.num_blocks[rows]
        counts = blocks - held
        lacking = np.flatnonzero(counts)
        spans = zip(rows[lacking].tolist(), held[lacking].tolist(), blocks[lacking].tolist(), strict=True)
        fresh = [state.table[row, start:stop] for row, start, stop in spans]
        state.num_on_device[rows] = blocks
        first = np.cumsum(counts) - counts
        columns = [rows, given_ids(state, scheduled), scheduled.starts, held, blocks, first]
        sent = np.concatenate([[len(rows)], *columns, *fresh])
        self.upload.fill(self._sent, [sent.astype(np.int32)])
        return self._sent[1 : 1 + len(rows)]

    def fill(self, size: int) -> None:
        """Fill the inputs of `size` sequences from what was sent; a part of the graph."""
        decode_inputs(self._sent, self._table, self.last, self.inputs, size, self.state.block_size)
