"""CUDA graphs of steps with prompts, in segments: what mixes a sequence's tokens, as attention, is launched between
them.

A step with a prompt that is launched kernel by kernel takes the host longer than the GPU up to some hundred or thousand
tokens, and every sequence that decodes waits for it. So the rest of the model is captured for some numbers of tokens
(kernels/segmented_graph.py), and steps are padded with tokens that write nothing and are unused. As with graphs.py,
all ranks must capture the same sizes in the same order.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor

from ...comm.base import Comm
from ...kernels.segmented_graph import SegmentedGraph
from ..model.base import Model
from ..model.batch import Batch, Replayed, StepArrays
from ..model.cache_spec import Caches
from .batch_builder import build_batches
from .state import BatchState, ScheduledBatch
from .upload import Upload

SIZES = [16, 32, 64, 96, *range(128, 1025, 64), *range(1152, 2049, 128), *range(2304, 4097, 256)]
# The share of a step's time without attention that launching takes, at least, for graphs to pay: a whole step's
# launches take half as long again, as attention's and the sampler's come with them, and other threads run.
HOST_BOUND = 0.6
TIMED = 3  # runs, of which the shortest counts: some ask CUDA for memory
HEADROOM = 4  # times what a step takes of the GPU's memory has to be free beside the largest step: graphs keep it

log = logging.getLogger("phalanx")


class PiecewiseGraphs:
    """Piecewise graphs of a GPU rank without pipeline stages. Made and used in the step thread, on its CUDA stream."""

    def __init__(
        self, model: Model, state: BatchState, last: Tensor, caches: Caches, upload: Upload, tokens: int, peak: int
    ):  # fmt: skip
        """last: as build_batches has it. tokens: the most of a step that may be captured.
        peak: bytes that the largest step takes in addition to weights and cache, which graphs have to leave."""
        self.model, self.state, self.last, self.caches, self.upload = model, state, last, caches, upload
        self._peak = peak
        self._wanted = [size for size in SIZES if size <= tokens]
        most = max(self._wanted, default=0)
        # Until there is a step, tokens that differ: equal ones would all visit the same experts while `_pays` times.
        self._ids = torch.arange(most, device=last.device) % model.vocab_size
        self._positions = torch.zeros_like(self._ids)
        self._slots = [torch.full_like(self._ids, -1) for _ in state.groups]
        self._replayed = Replayed(most)
        self._captured: dict[int, tuple[SegmentedGraph, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def most(self) -> int:
        """Tokens of the largest captured step; 0: none is."""
        return max(self._captured, default=0)

    def capture(self, group: Comm, reached: Callable[[int], None]) -> None:
        """Capture all sizes up to the largest that `_pays`, or none. group: all ranks of the model, which agree on it.
        Calls reached(sizes done)."""
        count = bisect.bisect_left(self._wanted, True, key=lambda size: not self._pays(size, group))
        for done, size in enumerate(reversed(self._wanted[:count])):  # the largest first, as in graphs.py
            reached(done)
            self._run(size)  # a warm-up
            torch.cuda.current_stream().synchronize()
            why = self._capture(size)
            if not self._all(group, not why):
                self._captured.clear()
                if why:  # each rank that has a reason
                    log.warning("steps with prompts are launched kernel by kernel, as one of %d tokens: %s", size, why)
                break

    def _capture(self, size: int) -> str:
        """Why the step cannot be captured; "": it is."""
        segmented = SegmentedGraph(self._pool)
        try:
            self._captured[size] = segmented, segmented.capture(lambda: self._run(size))
        except RuntimeError as error:  # torch's of CUDA, too
            return str(error).strip().partition("\n")[0] or "it fails"
        return ""

    def _pays(self, size: int, group: Comm) -> bool:
        """Whether the host launches for much of the step's time, and all GPUs have room for its graphs. Of several
        ranks the slowest count, as the others wait for them."""
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self._run(size)
        torch.cuda.synchronize()
        takes = torch.cuda.max_memory_allocated() - before
        torch.cuda.empty_cache()  # what torch keeps for later steps is free for the largest one, too
        room = HEADROOM * takes + self._peak <= torch.cuda.mem_get_info()[0]
        times = []
        for _ in range(TIMED):
            self._all(group, True)  # they begin together
            started = time.perf_counter()
            self._run(size)
            launched = time.perf_counter()
            torch.cuda.synchronize()
            times.append((launched - started, time.perf_counter() - started))
        mine = [min(column) for column in zip(*times, strict=True)]
        said = group.all_gather(torch.tensor([*mine, -float(room)], device=torch.cuda.current_device()))
        launched, whole, lacks = said.amax(0).tolist()
        return launched >= HOST_BOUND * whole and lacks < 0

    @staticmethod
    def _all(group: Comm, mine: bool) -> bool:
        said = torch.tensor([int(mine)], device=torch.cuda.current_device())
        return bool(group.all_gather(said).min())

    def close(self) -> None:
        torch.cuda.current_stream().synchronize()
        self._captured.clear()

    def supports(self, scheduled: ScheduledBatch) -> bool:
        return 0 < int(scheduled.counts.sum()) <= self.most

    def replay(self, scheduled: ScheduledBatch) -> tuple[Tensor, Batch, Tensor]:
        """The residual stream [T, hidden] of a supported step, valid until the next replay, its batch, and the rows of
        sampled tokens [S] int64."""
        (batch,), rows = build_batches(self.state, scheduled, self.last, self.caches, self.upload)
        n = len(batch.ids)
        size = min(size for size in self._captured if size >= n)
        self._ids[:n], self._positions[:n] = batch.ids, batch.positions
        for slots, of_group in zip(self._slots, (batch, *batch.further), strict=True):
            slots[:n] = of_group.slots
            slots[n:size] = -1
        self._replayed.batch = batch
        segmented, hidden = self._captured[size]
        segmented.replay(n)
        return hidden[:n], batch, rows

    def _run(self, size: int) -> Tensor:
        """The step's residual stream, without what is not captured where there is no step yet."""
        none = self._ids[:0]
        arrays = StepArrays(self._positions[:size], self._slots[0][:size], *[none] * 5)
        batch = Batch.of(self._ids[:size], arrays, [], [], self.caches, replayed=self._replayed)
        batch.add_groups([(slots[:size], none) for slots in self._slots[1:]], self.state.layer_groups)
        return self.model.forward([batch])
