"""Executes plans on one rank: prepare, forward through this rank's layers, sample.

On a CPU the work runs in one thread, the step thread, which stands for the device's stream: `start` returns at once and
plans queue up behind each other. All tensor communication happens in it, in plan order. On a GPU it has a stream of
its own, and nothing in it waits for the device. Steps in which every sequence decodes are replayed, as CUDA graphs or
as recorded C++ operations, unless there are pipeline stages: messages between those would have to be captured too.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ... import errors
from ...comm import custom_allreduce
from ...comm.mesh import Mesh
from ...comm.watchdog import LocalWatchdog
from ...kernels.collective import allreduce
from ...kernels.cpp import ops
from ...kernels.device import device_caps
from ...kernels.gemm import autotune
from .. import protocol
from ..model.base import Model
from .batch_builder import build_batches
from .cpu_graphs import CpuDecodeGraphs, Head
from .graphs import DecodeGraphs, gemms
from .pooler import Pooler
from .sampler import Logprobs, Sampler, is_plain_greedy, tp_argmax
from .state import BatchState, ScheduledBatch
from .upload import Upload

log = logging.getLogger("phalanx")
MIN_MICROBATCH_TOKENS = 1024  # of fewer, products would leave a part of the GPU idle


class DeviceOutput(NamedTuple):
    """What a step has made, still on the device."""

    ids: Tensor | None = None  # [S] int64, sampled; None: nothing was, or not here
    explained: Logprobs | None = None
    pooled: dict[int, Tensor] = {}  # by index into ids: embeddings, [hidden] f32


class StepFuture:
    """A step's outcome, filled in by the step thread; on a GPU it is still on its way to the host then."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._computed = DeviceOutput()
        self._copied: torch.cuda.Event | None = None

    def set(self, computed: DeviceOutput) -> None:
        ids, explained, pooled = computed
        if ids is not None and ids.is_cuda:
            if explained is not None:
                tensors = map(_to_host, (explained.chosen, explained.values, explained.ids))
                explained = Logprobs(explained.rows, explained.counts, *tensors)
            computed = DeviceOutput(_to_host(ids), explained, {i: _to_host(vector) for i, vector in pooled.items()})
            self._copied = torch.cuda.Event(blocking=True)
            self._copied.record()
        self._computed = computed
        self._ready.set()

    def wait(self, seconds: float | None) -> bool:
        """True once the step is computed and its outcome is on the host."""
        if not self._ready.wait(seconds):
            return False
        if self._copied is None or self._copied.query():
            return True
        if seconds is None:
            self._copied.synchronize()
            return True
        time.sleep(seconds)
        return self._copied.query()

    def output(self) -> protocol.StepOutput:
        if self._computed.ids is None:
            return protocol.StepOutput(b"")
        ids, logprobs = self._computed.ids.tolist(), {}
        if (explained := self._computed.explained) is not None:
            parts = (explained.chosen.tolist(), explained.values.tolist(), explained.ids.tolist())
            for row, count, chosen, values, top in zip(explained.rows, explained.counts, *parts, strict=True):
                logprobs[row] = protocol.TokenLogprob(
                    ids[row], chosen, list(zip(top[:count], values[:count], strict=True))
                )
        embeddings = {i: vector.numpy().tobytes() for i, vector in self._computed.pooled.items()}
        return protocol.StepOutput(protocol.pack_u32(ids), logprobs, embeddings)


def _to_host(x: Tensor) -> Tensor:
    """A copy that is there once the stream has come so far."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


def min_microbatch_tokens(model: Model, mesh: Mesh, device: torch.device) -> int:
    """Of each of two parts that steps are cut into, so that the one's sums hide behind the other's products.

    0: none is, as on CPUs, where nothing computes beside a sum, or on GPUs where cuDNN takes whole prompts. Small sums
    are not worth it: allreduce.py is quick.
    """
    if device.type != "cuda" or mesh.tensor.size == 1 or not device_caps(device).hopper:
        return 0
    return max(MIN_MICROBATCH_TOKENS, allreduce.SLOT // (model.hidden_size * model.dtype.itemsize) + 1)


class ModelRunner:
    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        rows: BatchState,
        sampler: Sampler,
        caches: list[tuple[Tensor, Tensor]],
        watch: LocalWatchdog,
    ):
        self.model = model
        self.mesh = mesh
        self.rows = rows
        self.sampler = sampler
        self.caches = caches
        self.watch = watch
        self.device = sampler.device
        self.block_size = caches[0][0].shape[1]
        self._last = torch.zeros(len(rows.length), dtype=torch.int64, device=self.device)  # newest token of each row
        # First stage: rows whose ids the last stage still owes, a step each, on the host and on the device.
        self._awaited: deque[tuple[np.ndarray, Tensor]] = deque()
        self._pool = Pooler(model)
        self._greedy = np.zeros(len(rows.length), bool)  # rows whose next token the largest logit decides alone
        self._launched: deque[tuple[int, torch.cuda.Event]] = deque()  # on a GPU: steps that may not be finished yet
        self._upload = Upload(self.device)
        self._least = min_microbatch_tokens(model, mesh, self.device)
        self._graphs: DecodeGraphs | CpuDecodeGraphs | None = None
        self._queue: queue.SimpleQueue[tuple[protocol.Plan, StepFuture] | None] = queue.SimpleQueue()
        self.ready = threading.Event()  # the step thread can execute plans; where it cannot, the process ends
        self._thread = threading.Thread(target=self._execute_all, name="step", daemon=True)
        self._thread.start()

    def start(self, plan: protocol.Plan) -> StepFuture:
        result = StepFuture()
        self._queue.put((plan, result))
        return result

    def finish(self) -> None:
        """Execute what is queued, then end the step thread."""
        self._queue.put(None)
        self._thread.join()

    def _execute_all(self) -> None:
        try:
            with errors.memory_for("CUDA graphs and the kernels' workspaces", errors.LESS_MEMORY):
                self._prepare()
            self.ready.set()
            with errors.memory_for("a step", errors.LESS_MEMORY):
                while (item := self._queue.get()) is not None:
                    plan, result = item
                    self.watch.entered = plan.step
                    result.set(self._execute(plan))
                    self._finished(plan.step)
            self._receive_ids(len(self._awaited))
            if self._graphs is not None:
                self._graphs.close()
        except BaseException as error:
            self.watch.fail(error)

    def _prepare(self) -> None:
        torch.set_grad_enabled(False)
        if self.device.type == "cuda":
            self._enter_device()
        elif self.mesh.stages == 1 and ops.available():
            self._graphs = CpuDecodeGraphs(self.model, self.rows, self._last, self.caches)

    def _finished(self, number: int) -> None:
        """The step has been computed or, on a GPU, launched: there the watch asks for its end."""
        if self.device.type == "cpu":
            self.watch.finished = number
        else:
            event = torch.cuda.Event()
            event.record()
            self._launched.append((number, event))

    def _poll_device(self) -> None:
        """In the watch's thread: which steps the device has finished. A collective that hangs is seen only so."""
        while self._launched and self._launched[0][1].query():
            self.watch.finished, _ = self._launched.popleft()

    def _enter_device(self) -> None:
        self.watch.poll_device = self._poll_device
        torch.cuda.set_device(self.device)
        torch.cuda.synchronize()  # what the main thread left on its stream: weights, the cache
        torch.cuda.set_stream(torch.cuda.Stream())  # the default one cannot be captured
        self.watch.begin("choosing kernels")
        chosen = autotune.tune(gemms(self.model, len(self.rows.length)))
        custom_allreduce.agree_on_tuning(self.mesh.tensor)
        if chosen and self.mesh.world.rank == 0:
            log.info(chosen)
        if self.mesh.stages == 1:
            graphs = self._graphs = DecodeGraphs(self.model, self.rows, self._last, self.caches, self._upload)
            started = time.monotonic()
            self.watch.begin("capturing CUDA graphs")
            graphs.capture(self.watch.reached)
            if self.mesh.world.rank == 0:
                seconds, count = time.monotonic() - started, len(graphs.sizes)
                log.info("captured CUDA graphs of %d batch sizes in %.1f s", count, seconds)

    def _enter(self, plan: protocol.Plan) -> None:
        """Rows leave and sequences enter. What the ranks choose their collectives by has to be known to all of them."""
        for row in protocol.unpack_u16(plan.freed):
            self._pool.leave(row)
        for new in plan.new:
            self._pool.enter(new)
            self._greedy[new.row] = is_plain_greedy(new.sampling)
        if self._samples_here:
            for row in protocol.unpack_u16(plan.freed):
                self.sampler.leave(row)
            for new in plan.new:
                self.sampler.enter(new)

    def _execute(self, plan: protocol.Plan) -> DeviceOutput:
        work = self.rows.apply(plan)
        self._enter(plan)
        self._receive_ids(self._owed(work.rows))
        if self._graphs is not None and self._graphs.suits(work) and self._pool.empty:
            return DeviceOutput(*self._sample(*self._graphs.replay(work), work, self._graphs.head))
        last_token_only, least = self.mesh.last, self._least
        if not self._pool.empty:  # embeddings are made of all rows in their order
            last_token_only, least = False, 0
        batches, sampled_rows = build_batches(
            self.rows, work, self._last, self.caches, self.block_size, self._upload, last_token_only, least
        )
        pipe = self.mesh.pipe
        hidden = None
        if not self.mesh.first:
            shape = int(work.counts.sum()), self.model.hidden_size
            hidden = torch.empty(shape, dtype=self.model.dtype, device=self.device)
            pipe.recv(hidden, pipe.rank - 1)
        hidden = self.model.forward(batches, hidden)
        if not self.mesh.last:
            pipe.send(hidden, pipe.rank + 1)
            if self.mesh.first and len(sampled_rows):
                self._awaited.append((work.sampled_rows, sampled_rows))
            return DeviceOutput()
        pooled = self._pool.take(hidden, work) if self._samples_here and not self._pool.empty else {}
        if not work.samples.any():
            return DeviceOutput()
        sampled = hidden if last_token_only else hidden[batches[0].sample_at]
        return DeviceOutput(*self._sample(sampled, sampled_rows, work), pooled)

    @property
    def _samples_here(self) -> bool:
        return self.mesh.last and self.mesh.tensor.rank == 0

    def _sample(
        self, hidden: Tensor, sampled_rows: Tensor, work: ScheduledBatch, head: Head | None = None
    ) -> tuple[Tensor, Logprobs | None]:
        """Ids [S] on every rank of the last stage. head: what it makes of `hidden`, if that has been computed."""
        shard = head.logits if head else self.model.logits(hidden)  # [S, vocab / tp], padded alike on all ranks
        if self._greedy[work.sampled_rows].all():
            ids, explained = tp_argmax(shard, self.mesh.tensor, head.best if head else None), None
        else:
            ids, explained = self._sample_whole(shard, work)
        self._last[sampled_rows] = ids
        if not self.mesh.first:
            self.mesh.feedback.isend(ids, 0)
        return ids, explained

    def _sample_whole(self, shard: Tensor, work: ScheduledBatch) -> tuple[Tensor, Logprobs | None]:
        """Of all the logits, on one rank, so that rounding cannot split the group."""
        logits = self.mesh.tensor.all_gather(shard.contiguous())  # [tp, S, vocab / tp]
        rows = work.sampled_rows
        explained = None
        if self._samples_here:
            logits = logits.permute(1, 0, 2).reshape(len(rows), -1)[:, : self.model.vocab_size]
            ids, explained = self.sampler.sample(logits.float(), rows, work.outputs[work.samples])
        else:
            ids = torch.empty(len(rows), dtype=torch.int64, device=self.device)
        return self.mesh.tensor.broadcast(ids, 0), explained

    def _owed(self, rows: np.ndarray) -> int:
        """First of several stages: how many steps' ids have to be here before these rows can be computed."""
        owed = [i + 1 for i, (awaited, _) in enumerate(self._awaited) if np.isin(rows, awaited).any()]
        return owed[-1] if owed else 0

    def _receive_ids(self, steps: int) -> None:
        """The ids of the oldest steps that the last stage owes: as late as they are needed, so that no stage idles."""
        for _ in range(steps):
            _, rows = self._awaited.popleft()
            ids = torch.empty(len(rows), dtype=torch.int64, device=self.device)
            self.mesh.feedback.recv(ids, self.mesh.stages - 1)
            self._last[rows] = ids
