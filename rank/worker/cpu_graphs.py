"""A CPU's decode steps by record and replay: kernels/cpp/graph.py under the interface of graphs.py's DecodeGraphs.

Recording computes the step as well, so that each number of rows is recorded when it first comes up, and nothing is
filled up. Where something besides C++ operations computes, as MPI does between hosts, such steps stay as they are.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.cpp.graph import Graph, Memory, capture
from ...kernels.gemm.cpu_gemm import MOST_ROWS
from ...kernels.sampling.argmax import argmax
from ..model.base import Model
from ..model.batch import Batch
from .batch_builder import given_ids
from .state import BatchState, ScheduledBatch

log = logging.getLogger("phalanx")


class Head(NamedTuple):
    """What the head makes of a replayed step, valid until the next replay."""

    logits: Tensor  # Model.logits of all rows
    best: tuple[Tensor, Tensor]  # argmax of them


class _Captured(NamedTuple):
    layers: Graph
    hidden: Tensor
    head: tuple[Graph, Head] | None  # None: something else than our operations computes there


class CpuDecodeGraphs:
    """Made and used in the step thread."""

    head: Head | None = None  # of the latest replay, where the head is replayed as well

    def __init__(self, model: Model, rows: BatchState, last: Tensor, caches: list[tuple[Tensor, Tensor]]):
        self.model, self.rows, self.last, self.caches = model, rows, last.numpy(), caches
        self.block_size = caches[0][0].shape[1]
        self.most = min(len(rows.length), MOST_ROWS)  # of more, torch's products are in every step
        self._ids, self._positions, self._slots = torch.zeros(3, self.most, dtype=torch.int64)
        self._lengths = torch.zeros(self.most, dtype=torch.int32)
        self._tables = torch.zeros(self.most, rows.table.shape[1], dtype=torch.int32)
        self._starts = torch.arange(self.most + 1, dtype=torch.int32)
        self._inputs = [x.numpy() for x in (self._ids, self._positions, self._slots, self._lengths, self._tables)]
        self._memory = Memory()
        self._captured: dict[int, _Captured] = {}
        self._able = True

    def close(self) -> None:
        self._captured.clear()

    def suits(self, work: ScheduledBatch) -> bool:
        n = len(work.rows)
        return self._able and 0 < n <= self.most and work.num_decodes == n and bool(work.samples.all())

    def replay(self, work: ScheduledBatch) -> tuple[Tensor, Tensor]:
        """The residual stream [B, hidden] of a step that suits, and its rows [B]; valid until the next replay."""
        n = len(work.rows)
        self._fill(work)
        self.head = None
        if n in self._captured:
            layers, hidden, head = self._captured[n]
            layers.replay()
            if head is not None:
                head[0].replay()
                self.head = head[1]
        else:
            hidden = self._capture(n, work)
        return hidden, torch.from_numpy(work.rows)

    def _fill(self, work: ScheduledBatch) -> None:
        n, row, starts = len(work.rows), work.rows, work.starts
        ids, positions, slots, lengths, tables = self._inputs
        given = given_ids(self.rows, work)
        np.copyto(ids[:n], np.where(given < 0, self.last[row], given))
        positions[:n] = starts
        block, offset = np.divmod(starts, self.block_size)
        slots[:n] = self.rows.table[row, block].astype(np.int64) * self.block_size + offset
        lengths[:n] = starts + 1
        width = int(block.max()) + 1
        tables[:n, :width] = self.rows.table[row, :width]

    def _capture(self, n: int, work: ScheduledBatch) -> Tensor:
        batch = Batch(
            ids=self._ids[:n],
            positions=self._positions[:n],
            slots=self._slots[:n],
            block_tables=self._tables[:n],
            lengths=self._lengths[:n],
            query_starts=self._starts[: n + 1],
            sample_at=self._ids[:0],
            num_decodes=n,
            query_lens=[1] * n,
            kv_lens=(work.starts + 1).tolist(),
            caches=self.caches,
        )
        hidden, layers, reason = capture(lambda: self.model.forward([batch]), self._memory)
        if layers is None:
            self._able = False
            log.debug("decode steps are not recorded, as %s", reason)
            return hidden

        def head() -> Head:
            logits = self.model.logits(hidden)
            return Head(logits, argmax(logits))

        self.head, graph, reason = capture(head, self._memory)
        if graph is None:
            log.debug("the head of decode steps is not recorded, as %s", reason)
        self._captured[n] = _Captured(layers, hidden, (graph, self.head) if graph is not None else None)
        return hidden
