"""Batches of decode steps that are captured: their tensors stay where they are and are refilled for each step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...kernels.sampling.decode_inputs import decode_inputs, empty, num_columns
from ..model.batch import Batch, StepArrays
from ..model.cache_spec import Caches
from .batch_builder import batch_arrays, further_slot_mappings, given_ids
from .state import BatchState, ScheduledBatch
from .upload import Upload


class DecodeBatch:
    """The inputs of steps of up to `most` sequences with query_len tokens each."""

    def __init__(self, state: BatchState, last: Tensor, caches: Caches, most: int, query_len: int = 1):
        """last: [max_num_seqs, 1 + drafts] int64, each row's newest token and the drafts made behind it."""
        self.state, self.last, self.caches, self.query_len = state, last, caches, query_len
        # Inputs of each cache group; all but the first use slots and block tables alone.
        self.inputs = [empty(most, state.table.shape[1], last.device, query_len) for _ in state.groups]
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=last.device) * query_len

    def batch(self, size: int, kv_lens: list[int]) -> Batch:
        """The first `size` sequences. kv_lens: their lengths, by which kernels are chosen."""
        ids, positions, slots, rows, lengths, tables = self.inputs[0]
        tokens, starts = size * self.query_len, self._starts[: size + 1]
        arrays = StepArrays(
            positions[:tokens], slots[:tokens], tables[:size], lengths[:size], rows[:size], starts, ids[:0]
        )
        batch = Batch.of(ids[:tokens], arrays, [self.query_len] * size, kv_lens, self.caches, self.query_len)
        batch.add_groups([(one.slots[:tokens], one.tables[:size]) for one in self.inputs[1:]], self.state.layer_groups)
        return batch


class HostDecodeBatch(DecodeBatch):
    """Decode inputs on a CPU: those of eager steps, in tensors that stay."""

    def fill(self, scheduled: ScheduledBatch) -> None:
        ids, positions, slots, rows, lengths, tables = (x.numpy() for x in self.inputs[0])
        n, given, made = len(scheduled.rows), given_ids(self.state, scheduled), batch_arrays(self.state, scheduled)
        tokens = len(given)
        kept = self.last.numpy()[made.rows.repeat(self.query_len), np.maximum(-1 - given, 0)]
        ids[:tokens] = np.where(given < 0, kept, given)
        positions[:tokens] = made.positions + self.state.shift[made.rows].repeat(self.query_len)
        slots[:tokens], rows[:n], lengths[:n] = made.slots, made.rows, made.lengths
        tables[:n, : made.block_tables.shape[1]] = made.block_tables
        for inputs, (slots, tables) in zip(
            self.inputs[1:], further_slot_mappings(self.state, scheduled, made), strict=True
        ):
            inputs.slots.numpy()[:tokens] = slots
            inputs.tables.numpy()[:n, : tables.shape[1]] = tables


class DeviceDecodeBatch(DecodeBatch):
    """Decode inputs on a GPU, which keeps block tables; each step uploads new blocks only."""

    def __init__(
        self, state: BatchState, last: Tensor, caches: Caches, most: int, upload: Upload, query_len: int = 1,
        other: DeviceDecodeBatch | None = None,
    ):  # fmt: skip
        """other: of another query_len. All have one device table, as the state knows how much of it is there."""
        super().__init__(state, last, caches, most, query_len)
        self.upload = upload
        if other is None:
            self._table = torch.zeros(state.table.shape, dtype=torch.int32, device=last.device)
        else:
            self._table = other._table
        size = 1 + most * (num_columns(query_len) + state.table.shape[1])
        self._sent = [torch.zeros(size, dtype=torch.int32, device=last.device) for _ in state.groups]

    def send(self, scheduled: ScheduledBatch) -> Tensor:
        """Uploads what `fill` reads. Returns the rows, [B] int32 on the device, valid until the next step is sent."""
        given = given_ids(self.state, scheduled).reshape(-1, self.query_len)
        self._send(0, scheduled, given)
        for group in range(1, len(self._sent)):
            self._send(group, scheduled, np.zeros_like(given))  # else the newest token of a row would be looked up
        return self._sent[0][1 : 1 + len(scheduled.rows)]

    def _send(self, group: int, scheduled: ScheduledBatch, given: np.ndarray) -> None:
        state, rows = self.state, self.state.rows_of(scheduled.rows, group)
        held, blocks = state.num_on_device[rows], state.num_blocks[rows]
        counts = blocks - held
        lacking = np.flatnonzero(counts)
        spans = zip(rows[lacking].tolist(), held[lacking].tolist(), blocks[lacking].tolist(), strict=True)
        fresh = [state.table[row, start:stop] for row, start, stop in spans]
        state.num_on_device[rows] = blocks
        first = np.cumsum(counts) - counts
        shift = state.shift[scheduled.rows]
        columns = [rows, given[:, 0], scheduled.starts, held, blocks, first, shift, *given[:, 1:].T]
        sent = np.concatenate([[len(rows)], *columns, *fresh])
        self.upload.fill(self._sent[group], [sent.astype(np.int32)])

    def fill(self, size: int) -> None:
        """Fill the inputs of `size` sequences from what was sent; a part of the graph."""
        for sent, inputs in zip(self._sent, self.inputs, strict=True):
            decode_inputs(sent, self._table, self.last, inputs, size, self.state.block_size, self.query_len)
