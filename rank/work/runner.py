"""Executes plans on one rank: prepare, forward through this rank's layers, sample.

On a CPU the work runs in one thread, the step thread, which stands for the device's stream: `start` returns at once and
plans queue up behind each other. All tensor communication happens in it, in plan order. On a GPU it has a stream of
its own, and nothing in it waits for the device: steps in which every sequence decodes are replayed as CUDA graphs,
unless there are pipeline stages, where messages between them would have to be captured as well.
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

from ...comm import oneshot
from ...comm.mesh import Mesh
from ...comm.watch import LocalWatch
from ...kernels import allreduce, choice
from ...kernels.chip import chip
from .. import step
from ..model.base import Model
from .graphs import Graphs, products
from .pool import Pool
from .prepare import prepare
from .rows import Rows, Work
from .sampler import Explained, Sampler, plainly_greedy, split_argmax
from .upload import Upload

log = logging.getLogger("phalanx")
LEAST_ROWS = 1024  # of fewer, products would leave a part of the GPU idle


class Computed(NamedTuple):
    """What a step has made, still on the device."""

    ids: Tensor | None = None  # [S] int64, sampled; None: nothing was, or not here
    explained: Explained | None = None
    pooled: dict[int, Tensor] = {}  # by index into ids: embeddings, [hidden] f32


class Result:
    """A step's outcome, filled in by the step thread; on a GPU it is still on its way to the host then."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._computed = Computed()
        self._copied: torch.cuda.Event | None = None

    def set(self, computed: Computed) -> None:
        ids, explained, pooled = computed
        if ids is not None and ids.is_cuda:
            if explained is not None:
                tensors = map(_to_host, (explained.chosen, explained.values, explained.ids))
                explained = Explained(explained.rows, explained.counts, *tensors)
            computed = Computed(_to_host(ids), explained, {i: _to_host(vector) for i, vector in pooled.items()})
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

    def outcome(self) -> step.Outcome:
        if self._computed.ids is None:
            return step.Outcome(b"")
        ids, logprobs = self._computed.ids.tolist(), {}
        if (explained := self._computed.explained) is not None:
            parts = (explained.chosen.tolist(), explained.values.tolist(), explained.ids.tolist())
            for row, count, chosen, values, top in zip(explained.rows, explained.counts, *parts, strict=True):
                logprobs[row] = step.TokenLogprob(ids[row], chosen, list(zip(top[:count], values[:count], strict=True)))
        embeddings = {i: vector.numpy().tobytes() for i, vector in self._computed.pooled.items()}
        return step.Outcome(step.pack_u32(ids), logprobs, embeddings)


def _to_host(x: Tensor) -> Tensor:
    """A copy that is there once the stream has come so far."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


def least_rows(model: Model, mesh: Mesh, device: torch.device) -> int:
    """Of each of two parts that steps are cut into, so that the one's sums hide behind the other's products.

    0: none is, as on CPUs, where nothing computes beside a sum, or on GPUs where cuDNN takes whole prompts. Small sums
    are not worth it: allreduce.py is quick.
    """
    if device.type != "cuda" or mesh.tensor.size == 1 or not chip(device).hopper:
        return 0
    return max(LEAST_ROWS, allreduce.SLOT // (model.hidden_size * model.dtype.itemsize) + 1)


class Runner:
    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        rows: Rows,
        sampler: Sampler,
        caches: list[tuple[Tensor, Tensor]],
        watch: LocalWatch,
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
        self._pool = Pool(model)
        self._greedy = np.zeros(len(rows.length), bool)  # rows whose next token the largest logit decides alone
        self._launched: deque[tuple[int, torch.cuda.Event]] = deque()  # on a GPU: steps that may not be finished yet
        self._upload = Upload(self.device)
        self._least = least_rows(model, mesh, self.device)
        self._graphs: Graphs | None = None
        self._queue: queue.SimpleQueue[tuple[step.Plan, Result] | None] = queue.SimpleQueue()
        self.ready = threading.Event()  # the step thread can execute plans; where it cannot, the process ends
        self._thread = threading.Thread(target=self._execute_all, name="step", daemon=True)
        self._thread.start()

    def start(self, plan: step.Plan) -> Result:
        result = Result()
        self._queue.put((plan, result))
        return result

    def finish(self) -> None:
        """Execute what is queued, then end the step thread."""
        self._queue.put(None)
        self._thread.join()

    def _execute_all(self) -> None:
        try:
            self._prepare()
            self.ready.set()
            while (item := self._queue.get()) is not None:
                plan, result = item
                self.watch.entered = plan.step
                result.set(self._execute(plan))
                self._finished(plan.step)
            self._receive_ids(len(self._awaited))
            if self._graphs is not None:
                self._graphs.close()
        except torch.OutOfMemoryError as error:
            advice = "lower --kv-fraction, --max-num-batched-tokens or --max-num-seqs, or use more ranks"
            self.watch.fail(MemoryError(f"{str(error).splitlines()[0]} To leave more of it free, {advice}"))
        except BaseException as error:
            self.watch.fail(error)

    def _prepare(self) -> None:
        torch.set_grad_enabled(False)
        if self.device.type == "cuda":
            self._enter_device()

    def _finished(self, number: int) -> None:
        """The step has been computed or, on a GPU, launched: there the watch asks for its end."""
        if self.device.type == "cpu":
            self.watch.finished = number
        else:
            event = torch.cuda.Event()
            event.record()
            self._launched.append((number, event))

    def _settle(self) -> None:
        """In the watch's thread: which steps the device has finished. A collective that hangs is seen only so."""
        while self._launched and self._launched[0][1].query():
            self.watch.finished, _ = self._launched.popleft()

    def _enter_device(self) -> None:
        self.watch.settle = self._settle
        torch.cuda.set_device(self.device)
        torch.cuda.synchronize()  # what the main thread left on its stream: weights, the cache
        torch.cuda.set_stream(torch.cuda.Stream())  # the default one cannot be captured
        chosen = choice.choose(products(self.model, len(self.rows.length)))
        oneshot.agree(self.mesh.tensor)
        if chosen and self.mesh.world.rank == 0:
            log.info(chosen)
        if self.mesh.stages == 1:
            self._graphs = Graphs(self.model, self.rows, self._last, self.caches, self._upload)
            started = time.monotonic()
            self._graphs.capture()
            if self.mesh.world.rank == 0:
                seconds, count = time.monotonic() - started, len(self._graphs.sizes)
                log.info("captured CUDA graphs of %d batch sizes in %.1f s", count, seconds)

    def _enter(self, plan: step.Plan) -> None:
        """Rows leave and sequences enter. What the ranks choose their collectives by has to be known to all of them."""
        for row in step.unpack_u16(plan.freed):
            self._pool.leave(row)
        for new in plan.new:
            self._pool.enter(new)
            self._greedy[new.row] = plainly_greedy(new.sampling)
        if self._samples_here:
            for row in step.unpack_u16(plan.freed):
                self.sampler.leave(row)
            for new in plan.new:
                self.sampler.enter(new)

    def _execute(self, plan: step.Plan) -> Computed:
        work = self.rows.apply(plan)
        self._enter(plan)
        self._receive_ids(self._owed(work.rows))
        if self._graphs is not None and self._graphs.suits(work) and self._pool.empty:
            return Computed(*self._sample(*self._graphs.replay(work), work))
        narrow, least = self.mesh.last, self._least
        if not self._pool.empty:  # embeddings are made of all rows in their order
            narrow, least = False, 0
        batches, sampled_rows = prepare(
            self.rows, work, self._last, self.caches, self.block_size, self._upload, narrow, least
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
            return Computed()
        pooled = self._pool.take(hidden, work) if self._samples_here and not self._pool.empty else {}
        if not work.samples.any():
            return Computed()
        sampled = hidden if narrow else hidden[batches[0].sample_at]
        return Computed(*self._sample(sampled, sampled_rows, work), pooled)

    @property
    def _samples_here(self) -> bool:
        return self.mesh.last and self.mesh.tensor.rank == 0

    def _sample(self, hidden: Tensor, sampled_rows: Tensor, work: Work) -> tuple[Tensor, Explained | None]:
        """Ids [S] on every rank of the last stage."""
        shard = self.model.logits(hidden)  # [S, vocab / tp], padded alike on all ranks
        if self._greedy[work.sampled_rows].all():
            ids, explained = split_argmax(shard, self.mesh.tensor), None
        else:
            ids, explained = self._sample_whole(shard, work)
        self._last[sampled_rows] = ids
        if not self.mesh.first:
            self.mesh.feedback.post(ids, 0)
        return ids, explained

    def _sample_whole(self, shard: Tensor, work: Work) -> tuple[Tensor, Explained | None]:
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
