"""Records and replays decode steps on CPUs: kernels/cpp/graph.py behind the interface of graphs.py's DecodeGraphs.

Recording also computes the step. So each batch size is recorded when it first occurs, and batches are not padded. Steps
that need more than C++ operations, such as MPI between hosts, are not recorded.
"""

from __future__ import annotations

import functools
import logging
from typing import NamedTuple

import torch
from torch import Tensor

from ...comm.base import Comm
from ...kernels.cpp.graph import Graph, Memory, capture
from ...kernels.gemm.cpu_gemm import MAX_ROWS
from ...kernels.sampling.argmax import argmax
from ..model.base import Model
from ..model.batch import Batch
from ..model.cache_spec import Caches
from .decode_batch import HostDecodeBatch
from .sampler import tp_argmax
from .state import BatchState, ScheduledBatch

log = logging.getLogger("phalanx")


class Head:
    """The head's output in a replayed step, valid until the next replay."""

    def __init__(self, logits: Tensor, memory: Memory):
        self.logits = logits  # Model.logits of all rows
        self._best = argmax(logits)
        self._memory = memory
        self._ids: Tensor | None = None
        self._graph: Graph | None = None

    def argmax(self, group: Comm) -> Tensor:
        """tp_argmax of the logits; recorded where the collective is C++. Ranks may differ in whether it is."""
        if group.size == 1:
            return self._best[1].clone()
        if self._graph is not None and self._ids is not None:
            self._graph.replay()
        elif self._ids is None:
            choose = functools.partial(tp_argmax, self.logits, group, self._best)
            self._ids, self._graph, _ = capture(choose, self._memory)
        else:
            self._ids = tp_argmax(self.logits, group, self._best)
        return self._ids.clone()


class _Captured(NamedTuple):
    layers: Graph
    hidden: Tensor
    head: tuple[Graph, Head] | None  # None: the head needs more than C++ operations


class CpuDecodeGraphs:
    """Decode graphs of a CPU rank. Made and used in the step thread."""

    head: Head | None = None  # of the last replay, where the head is replayed too

    def __init__(self, model: Model, state: BatchState, last: Tensor, caches: Caches):
        self.model = model
        self.most = MAX_ROWS  # tokens; beyond, torch computes the GEMMs, which cannot be recorded
        self._inputs_of = functools.cache(
            lambda tokens: HostDecodeBatch(state, last, caches, min(len(last), self.most // tokens), tokens)
        )
        self._memory = Memory()
        self._captured: dict[tuple[int, int], _Captured] = {}  # by sequences, and tokens of each
        self._able = True

    def close(self) -> None:
        self._captured.clear()

    def supports(self, scheduled: ScheduledBatch) -> bool:
        tokens = len(scheduled.rows) * scheduled.query_len
        return self._able and 0 < tokens <= self.most and scheduled.all_decode

    def replay(self, scheduled: ScheduledBatch) -> tuple[Tensor, Tensor]:
        """The residual stream [T, hidden] of a supported step, and the row of each token [T]. Valid until the next
        replay."""
        self._inputs_of(scheduled.query_len).fill(scheduled)
        self.head = None
        size = len(scheduled.rows), scheduled.query_len
        if size in self._captured:
            layers, hidden, head = self._captured[size]
            layers.replay()
            if head is not None:
                head[0].replay()
                self.head = head[1]
        else:
            hidden = self._capture(size, scheduled)
        return hidden, torch.from_numpy(scheduled.sampled_rows)

    def batch(self, scheduled: ScheduledBatch) -> Batch:
        """The batch that was replayed last, a supported one."""
        lengths = (scheduled.starts + scheduled.query_len).tolist()
        return self._inputs_of(scheduled.query_len).batch(len(lengths), lengths)

    def _capture(self, size: tuple[int, int], scheduled: ScheduledBatch) -> Tensor:
        count, query_len = size
        batch = self._inputs_of(query_len).batch(count, (scheduled.starts + query_len).tolist())
        hidden, layers, reason = capture(lambda: self.model.forward([batch]), self._memory)
        if layers is None:
            self._able = False
            log.debug("decode steps are not recorded, as %s", reason)
            return hidden

        def head() -> Head:
            return Head(self.model.logits(hidden), self._memory)

        self.head, graph, reason = capture(head, self._memory)
        if graph is None:
            log.debug("the head of decode steps is not recorded, as %s", reason)
        self._captured[size] = _Captured(layers, hidden, (graph, self.head) if graph is not None else None)
        return hidden
