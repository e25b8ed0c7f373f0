"""Executes plans on one rank: builds the batch, runs this rank's layers, samples.

The step thread does all of it, in plan order; `start` only queues a plan. All tensor communication happens in the step
thread. On a CPU it stands for the device's stream. On a GPU it launches kernels on a CUDA stream of its own and never
waits for the device. Steps in which every sequence decodes are replayed, as CUDA graphs or as recorded C++ operations,
and on a GPU those with some prompt tokens, in segments. With pipeline stages they are not: the messages between stages
would have to be captured too.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ... import errors
from ...comm import custom_allreduce
from ...comm.mesh import Mesh
from ...comm.watchdog import LocalWatchdog
from ...kernels.cpp import ops
from ...kernels.gemm import autotune
from .. import protocol
from ..model.base import Model
from ..model.batch import Batch
from ..model.cache_spec import Caches
from ..model.drafts import DraftSource
from .batch_builder import build_batches, following_ids, sampled_at
from .cpu_graphs import CpuDecodeGraphs, Head
from .drafting import Drafting, DraftStep
from .graphs import DecodeGraphs, gemms
from .images import Images
from .piecewise_graphs import PiecewiseGraphs
from .pooler import Pooler
from .prompt_scorer import PromptLogprobs, PromptScorer
from .sampler import Logprobs, Sampled, Sampler, is_plain_greedy, tp_argmax
from .state import BatchState, ScheduledBatch
from .state_snapshots import StateSnapshots
from .swap import Swap
from .token_masks import RowMasks, TokenMasks
from .upload import Upload, to_host

log = logging.getLogger("phalanx")
# The steps that are timed at the start: sequences, how often each, of which the shortest counts, and how many times as
# long as a step of one token all of it may take before no larger ones are timed.
TIMED_SIZES, TIMES, TIMING = (1, 4, 16, 64, 256), 3, 24


class DeviceOutput(NamedTuple):
    """A step's output, still on the device."""

    ids: Tensor | None = None  # [S] int64, sampled; None: the step samples nothing, or another rank does
    logprobs: Logprobs | None = None
    pooled: dict[int, Tensor] = {}  # embeddings [hidden] f32, by index into ids
    scored: dict[int, list[PromptLogprobs]] = {}  # by the same index, on the host already
    failed: list[int] = []  # indices into ids of rows that there was no memory for
    counts: np.ndarray | None = None  # [R] int64, tokens of each row that samples; None: one each ...
    newest: Tensor | None = None  # ... and [R] int64 index into ids of each row's newest one: the others are rejected
    drafts: Tensor | None = None  # [R, wanted] int64, of what each of these rows will probably sample next


class StepFuture:
    """A step's output. The step thread sets it; on a GPU its copy to the host is then still running."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._output = DeviceOutput()
        self._copied: torch.cuda.Event | None = None

    def set(self, computed: DeviceOutput) -> None:
        ids, logprobs, pooled, *_ = computed
        if ids is not None and ids.is_cuda:
            if logprobs is not None:
                tensors = map(to_host, (logprobs.chosen, logprobs.values, logprobs.ids))
                logprobs = Logprobs(logprobs.rows, logprobs.counts, *tensors)
            pooled = {i: to_host(vector) for i, vector in pooled.items()}
            newest, drafts = (None if x is None else to_host(x) for x in (computed.newest, computed.drafts))
            computed = computed._replace(
                ids=to_host(ids), logprobs=logprobs, pooled=pooled, newest=newest, drafts=drafts
            )
            self._copied = torch.cuda.Event(blocking=True)
            self._copied.record()
        self._output = computed
        self._ready.set()

    def wait(self, seconds: float | None) -> bool:
        """Wait for so many seconds, or without limit. Returns whether the output is on the host."""
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
        """The step output. Call it only after `wait` has returned True."""
        if self._output.ids is None:
            return protocol.StepOutput(b"")
        ids, logprobs = self._output.ids.tolist(), {}
        if (found := self._output.logprobs) is not None:
            parts = (found.chosen.tolist(), found.values.tolist(), found.ids.tolist())
            for row, count, chosen, values, top in zip(found.rows, found.counts, *parts, strict=True):
                logprobs[row] = protocol.TokenLogprob(
                    ids[row], chosen, list(zip(top[:count], values[:count], strict=True))
                )
        embeddings = {i: vector.numpy().tobytes() for i, vector in self._output.pooled.items()}
        scored = {i: [entry for one in parts for entry in one.listed()] for i, parts in self._output.scored.items()}
        failed, counts = self._output.failed, b""
        if self._output.counts is not None and self._output.newest is not None:
            sampled, newest = self._output.counts, np.array(self._output.newest.tolist(), np.int64)
            row_of = np.repeat(np.arange(len(sampled)), sampled)  # embeddings and the like are by rows
            embeddings = {int(row_of[i]): one for i, one in embeddings.items()}
            scored = {int(row_of[i]): one for i, one in scored.items()}
            failed = sorted({int(row_of[i]) for i in failed})
            standing = np.flatnonzero(np.arange(len(ids)) <= newest[row_of]).tolist()
            counts = bytes((newest - np.cumsum(sampled) + sampled + 1).tolist())
            logprobs = {at: logprobs[i] for at, i in enumerate(standing) if i in logprobs}
            ids = [ids[i] for i in standing]
        drafts = b"" if self._output.drafts is None else protocol.pack_u32(self._output.drafts.flatten().tolist())
        return protocol.StepOutput(protocol.pack_u32(ids), logprobs, embeddings, scored, counts, failed, drafts)


@functools.cache
def step_stream(device: torch.device) -> torch.cuda.Stream:
    """The CUDA stream of all steps on this GPU. The default stream cannot be captured; and the models of a job share
    one, as the workspaces of GEMMs belong to a stream and stay."""
    return torch.cuda.Stream(device)


class StepLimits(NamedTuple):
    """Limits of this rank's steps."""

    microbatch_tokens: int  # the fewest of a microbatch; 0: steps stay whole
    token_budget: int
    peak_bytes: int  # that the largest takes beside weights and cache
    query_lens: tuple[int, ...] = (1,)  # tokens of a sequence in steps that decode
    verified_tokens: int = 0  # of all sequences in those that have several


class ModelRunner:
    """One rank's worker. Every rank has one and gets the same plans in the same order."""

    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        state: BatchState,
        sampler: Sampler,
        caches: Caches,
        watch: LocalWatchdog,
        swap: Swap | None,
        limits: StepLimits,
        source: DraftSource | None = None,
    ):
        """swap: the cache's host blocks, where there are any. source: of drafts, whose layers have the last caches."""
        own = [] if source is None else source.cache_specs()
        specs, drafts_caches = [*model.cache_specs(), *own], caches[len(caches) - len(own) :]
        self.model = model
        self.swap = swap
        self.mesh = mesh
        self.state = state
        self.sampler = sampler
        self.caches = caches[: len(caches) - len(own)]
        self.watch = watch
        self.device = sampler.model_device
        # Each row's newest token, and the drafts that were made behind it.
        self._last = torch.zeros(len(state.length), limits.query_lens[-1], dtype=torch.int64, device=self.device)
        # First pipeline stage: steps whose ids have not come from the last stage, and the rows of these on the device.
        self._awaited: deque[tuple[ScheduledBatch, Tensor]] = deque()
        self._pooler = Pooler(model)
        self._scorer = PromptScorer(model, state, mesh.tensor, self._samples_here)
        self._heads: dict[int, tuple[int, ...]] = {}  # by row: the heads that choose its tokens, in turn
        self._greedy = np.zeros(len(state.length), bool)  # rows whose next token is the argmax of the unchanged logits
        self._launched: deque[tuple[int, torch.cuda.Event]] = deque()  # on a GPU: steps that may not be finished yet
        self._upload = Upload(self.device)
        self._snapshots = StateSnapshots(specs, caches, len(state.length), self._upload)
        self._drafting: Drafting | None = None
        if source is not None:
            of = state, drafts_caches, self._upload, mesh.tensor, sampler, self._greedy
            self._drafting = Drafting(source, *of)
        self._token_masks = TokenMasks(len(state.length), Upload(sampler.device))
        self._limits = limits
        self._graphs: DecodeGraphs | CpuDecodeGraphs | None = None
        self._piecewise: PiecewiseGraphs | None = None
        self._images = Images(model, state, self.device, mesh.tensor)
        self._queue: queue.SimpleQueue[tuple[protocol.Plan, StepFuture] | protocol.Pixels | None] = queue.SimpleQueue()
        self.step_times: tuple[tuple[int, int, float], ...] = ()  # sequences, tokens of each, seconds of such a step
        self.ready = threading.Event()  # the step thread can execute plans; if it fails before, the process ends
        self._thread = threading.Thread(target=self._execute_all, name="step", daemon=True)
        self._thread.start()

    def start(self, plan: protocol.Plan) -> StepFuture:
        result = StepFuture()
        self._queue.put((plan, result))
        return result

    def mask(self, masks: protocol.Masks) -> None:
        """The masks of a step that waits for them, or soon will."""
        if self.mesh.last:
            self._token_masks.put(masks)

    @property
    def tower_seconds(self) -> float:
        """Seconds that the tower has worked on this rank."""
        return self._images.seconds

    def show(self, image: protocol.Pixels) -> None:
        """An image of a later plan."""
        self._queue.put(image)

    def finish(self) -> None:
        """Execute the queued plans, then end the step thread."""
        self._queue.put(None)
        self._thread.join()

    def _execute_all(self) -> None:
        try:
            with errors.memory_for("CUDA graphs and the kernels' workspaces", errors.LESS_MEMORY):
                self._prepare()
            self.ready.set()
            with errors.memory_for("a step", errors.LESS_MEMORY):
                while (item := self._queue.get()) is not None:
                    if isinstance(item, protocol.Pixels):
                        self._images.take(item)
                        continue
                    plan, result = item
                    self.watch.entered = plan.step
                    self._snapshots.load(plan)
                    if plan.tower:
                        self._images.work(plan.tower)
                    self._step(plan, result)
                    self._snapshots.save(plan)
                    self._finished(plan.step)
            self._receive_ids(len(self._awaited))
            for graphs in (self._drafting, self._graphs, self._piecewise):
                if graphs is not None:
                    graphs.close()
        except BaseException as error:
            self.watch.fail(error)

    def _prepare(self) -> None:
        torch.set_grad_enabled(False)
        if self.device.type == "cuda":
            self._enter_device()
        elif self.device.type == "cpu" and self.mesh.stages == 1 and ops.available():
            self._graphs = CpuDecodeGraphs(self.model, self.state, self._last, self.caches)
        if self._graphs is not None and len(self._limits.query_lens) > 1:
            self.step_times = self._time_steps(self._graphs)

    def _time_steps(self, graphs: DecodeGraphs | CpuDecodeGraphs) -> tuple[tuple[int, int, float], ...]:
        """Time captured steps and their heads, by which the scheduler compares numbers of drafts until it has seen its
        own. Tokens are drawn: so there are as many distinct experts as of so many tokens. All of them write block 0,
        which is in no table. Collective over the tensor group."""
        self.watch.begin("timing steps")
        draw, found, offload = np.random.default_rng(0), [], self.model.offload
        counted = dict(vars(offload.counters)) if offload is not None else {}
        longest, began, first = self.state.table.shape[1] * self.state.block_size, time.perf_counter(), 0.0
        for size in TIMED_SIZES:
            for query_len in self._limits.query_lens:
                times = []
                for _ in range(1 + TIMES):  # the first one may record
                    scheduled = self._drawn(size, query_len, draw)
                    fits = query_len <= longest and size <= len(self.state.length) and graphs.supports(scheduled)
                    if self._slowest(float(not fits)):  # recording may fail, and not on all ranks
                        break
                    ids = draw.integers(self.model.vocab_size, size=self._last.shape)
                    self._last.copy_(torch.from_numpy(ids))  # the same on all ranks
                    started = time.perf_counter()
                    hidden, _ = graphs.replay(scheduled)
                    if graphs.head is None:
                        self.model.logits(hidden)
                    if self.device.type == "cuda":
                        torch.cuda.synchronize()
                    times.append(time.perf_counter() - started)
                if len(times) > TIMES:
                    found.append((size, query_len, min(times[1:])))
                    first = first or self._slowest(found[0][2])
                    self.watch.reached(len(found))
            if self._slowest(time.perf_counter() - began) > TIMING * first:
                break
        if offload is not None:
            vars(offload.counters).update(counted)
        return tuple(found)

    def _slowest(self, seconds: float) -> float:
        """The most of the tensor group's."""
        mine = torch.tensor([seconds], dtype=torch.float32, device=self.device)
        return float(self.mesh.tensor.all_gather(mine).max())

    def _drawn(self, size: int, query_len: int, draw: np.random.Generator) -> ScheduledBatch:
        """A step at the beginning of so many sequences, with drawn drafts."""
        zeros, drafts = np.zeros(size, np.int64), None
        if query_len > 1:
            drafts = draw.integers(self.model.vocab_size, size=(size, query_len - 1))
        return ScheduledBatch(
            np.arange(size), zeros, zeros + query_len, np.ones(size, bool), zeros, query_len, drafts
        )  # fmt: skip

    def _finished(self, number: int) -> None:
        """Record that a step is computed or, on a GPU, launched; there `_poll_device` finds its end."""
        if self.device.type != "cuda":
            self.watch.finished = number
        else:
            event = torch.cuda.Event()
            event.record()
            self._launched.append((number, event))

    def _poll_device(self) -> None:
        """Tell the watchdog which steps the device has finished, in its thread: so it notices a hanging collective."""
        while self._launched and self._launched[0][1].query():
            self.watch.finished, _ = self._launched.popleft()

    def _enter_device(self) -> None:
        self.watch.poll_device = self._poll_device
        torch.cuda.set_device(self.device)
        torch.cuda.synchronize()  # the main thread's CUDA stream: weights, the cache
        torch.cuda.set_stream(step_stream(self.device))
        self.watch.begin("choosing kernels")
        self._snapshots.compile()
        chosen = autotune.tune(gemms(self.model, len(self.state.length)))
        custom_allreduce.agree_on_tuning(self.mesh.tensor)
        if chosen and self.mesh.world.rank == 0:
            log.info(chosen)
        if self.mesh.stages == 1:
            started = time.monotonic()
            self.watch.begin("capturing CUDA graphs")
            said = self._capture()
            if self.mesh.world.rank == 0:
                log.info("captured CUDA graphs of %s in %.1f s", said, time.monotonic() - started)

    def _capture(self) -> str:
        """The captured steps."""
        of = self.model, self.state, self._last, self.caches, self._upload
        graphs = self._graphs = DecodeGraphs(*of, self._limits.query_lens, self._limits.verified_tokens)
        graphs.capture(self.watch.reached)
        said = f"{len(graphs.sizes)} batch sizes"
        if len(self._limits.query_lens) > 1:
            said += f", with {' or '.join(map(str, self._limits.query_lens))} tokens of a sequence,"
        if self._drafting is not None:
            self._drafting.capture(graphs, self.watch.reached)
        layers = self.model.layer_offload
        if self.model.offload is not None or (layers is not None and layers.copies_layers):
            return said
        most, microbatch = self._limits.token_budget, self._limits.microbatch_tokens
        if microbatch:
            most = min(most, 2 * microbatch - 1)
        piecewise = self._piecewise = PiecewiseGraphs(*of, most, self._limits.peak_bytes)
        piecewise.capture(self.mesh.tensor, self.watch.reached)
        return f"{said} and of steps with prompts of up to {piecewise.most} tokens" if piecewise.most else said

    def _enter(self, plan: protocol.Plan) -> None:
        """Apply freed rows and new sequences to pooler, scorer and sampler. All ranks must know the pooled, the scored
        and the greedy rows: the choice of collectives depends on them."""
        for row in protocol.unpack_u16(plan.freed):
            self._pooler.leave(row)
            self._scorer.leave(row)
            self._images.leave(row)
            self._heads.pop(row, None)
        for new in plan.new:
            if new.sampling.heads:
                self._heads[new.row] = new.sampling.heads
            self._pooler.enter(new)
            self._images.enter(new)
            if self.mesh.last:
                self._scorer.enter(new)
            self._greedy[new.row] = is_plain_greedy(new.sampling)
            self._token_masks.enter(new)
        if self._samples_here:
            for row in protocol.unpack_u16(plan.freed):
                self.sampler.leave(row)
            for new in plan.new:
                self.sampler.enter(new)

    def _step(self, plan: protocol.Plan, result: StepFuture) -> None:
        """Execute a plan. Drafts that the ranks keep come after its result: the next step is planned meanwhile."""
        output, draft = self._execute(plan)
        if plan.keeps:
            result.set(output)
        drafts = draft() if draft is not None else None
        if not plan.keeps:
            result.set(output._replace(drafts=drafts))

    def _execute(self, plan: protocol.Plan) -> tuple[DeviceOutput, Callable[[], Tensor | None] | None]:
        """A step's output without drafts, and what makes these, where the draft model has to run."""
        scheduled = self.state.apply(plan)
        if self.swap is not None:
            self.swap.apply(plan)
        self._enter(plan)
        if not len(scheduled.rows):  # the tower's work alone
            return DeviceOutput(), None
        self._receive_ids(self._owed(scheduled.rows))
        drafts = self._drafting is not None and (plan.wanted > 0 or plan.follows)
        every = not (self._pooler.empty and self._scorer.empty)  # the hidden states of all tokens are needed, in order
        embeddings, heads = self._images.embeddings(scheduled), self._further_heads(scheduled)
        eager = every or embeddings is not None or heads is not None  # no graph has what these need
        if self._graphs is not None and self._graphs.supports(scheduled) and not eager:
            replayed, sampled_rows = self._graphs.replay(scheduled)
            output = self._sample(replayed, sampled_rows, scheduled, plan.step, self._graphs.head)
            of = [self._graphs.batch(scheduled)], replayed, sampled_rows, scheduled, output, plan
            return output, functools.partial(self._draft, *of, replayed=True) if drafts else None
        if self._piecewise is not None and self._piecewise.supports(scheduled) and not eager:
            hidden, batch, sampled_rows = self._piecewise.replay(scheduled)
            output = DeviceOutput()
            if len(sampled_rows):
                output = self._sample(hidden[batch.sample_at], sampled_rows, scheduled, plan.step)
            of = [batch], hidden, sampled_rows, scheduled, output, plan
            return output, functools.partial(self._draft, *of) if drafts else None
        # A draft model reads all tokens.
        last_token_only = self.mesh.last and not (every or drafts or self.model.aux_layers)
        min_tokens = 0 if eager else self._limits.microbatch_tokens
        batches, sampled_rows = build_batches(
            self.state, scheduled, self._last, self.caches, self._upload, last_token_only, min_tokens
        )
        batches[0].embeddings, batches[0].beyond = embeddings, heads is not None
        pipe = self.mesh.pipe
        received = None
        if not self.mesh.first:
            shape = int(scheduled.counts.sum()), self.model.received_size
            received = torch.empty(shape, dtype=self.model.dtype, device=self.device)
            pipe.recv(received, pipe.rank - 1)
        hidden = self.model.forward(batches, received)
        if not self.mesh.last:
            pipe.send(hidden, pipe.rank + 1)
            if self.mesh.first and len(sampled_rows):
                self._awaited.append((scheduled, sampled_rows))
            return DeviceOutput(), None
        pooled = self._pooler.pool(hidden, scheduled) if self._samples_here and not self._pooler.empty else {}
        scored = self._scorer.score(hidden, scheduled) if not self._scorer.empty else {}
        output = DeviceOutput()
        if scheduled.samples.any():
            sampled = hidden if last_token_only else hidden[sampled_at(batches)]
            output = self._sample(sampled, sampled_rows, scheduled, plan.step, heads=heads)
            output = output._replace(pooled=pooled, scored=scored)
        of = batches, hidden, sampled_rows, scheduled, output, plan
        return output, functools.partial(self._draft, *of) if drafts else None

    def _draft(
        self, batches: list[Batch], hidden: Tensor, sampled_rows: Tensor, scheduled: ScheduledBatch,
        output: DeviceOutput, plan: protocol.Plan, replayed: bool = False,
    ) -> Tensor | None:  # fmt: skip
        """Drafts [R, plan.wanted] of the rows that sample, on every rank of the last stage; None where none are wanted,
        or the ranks keep them. output: of the step."""
        assert self._drafting is not None
        ids = output.ids
        at, following = sampled_at(batches), ids
        if ids is None or len(ids) < sum(len(one.ids) for one in batches):
            (following,) = self._upload.send([following_ids(self.state, scheduled)])
            if ids is not None:
                following[at] = ids
        elif not len(at):  # of captured steps, which sample at all tokens
            at = torch.arange(len(ids), device=ids.device)
        if output.newest is not None:
            at, sampled_rows = at[output.newest], sampled_rows[output.newest]
        rows, lengths = sampled_rows.long(), torch.cat([one.positions for one in batches])[at] + 2
        assert following is not None
        made = self._drafting.step(
            DraftStep(batches, scheduled, hidden, following, at, rows, lengths, plan.wanted, replayed)
        )
        if not plan.keeps or made is None:
            return made
        self._last[rows, 1 : 1 + plan.wanted] = made
        return None

    @property
    def _samples_here(self) -> bool:
        return self.mesh.last and self.mesh.tensor.rank == 0

    def _further_heads(self, scheduled: ScheduledBatch) -> np.ndarray | None:
        """The head that chooses each sampled token, [S] int64; None: the step has no row with others than the
        vocabulary's."""
        if not self._heads or not any(row in self._heads for row in scheduled.rows.tolist()):
            return None
        sampled = zip(scheduled.sampled_rows.tolist(), scheduled.sampled_outputs.tolist(), strict=True)
        cycles = ((self._heads.get(row, (0,)), output) for row, output in sampled)
        return np.array([cycle[output % len(cycle)] for cycle, output in cycles], np.int64)

    def _sample(
        self, hidden: Tensor, sampled_rows: Tensor, scheduled: ScheduledBatch, step: int, head: Head | None = None,
        heads: np.ndarray | None = None,
    ) -> DeviceOutput:  # fmt: skip
        """Sample ids [S], on every rank of the last stage. head: the head's output for `hidden`, if a replay computed
        it. heads: as `_further_heads` has them."""
        tensor = self.mesh.tensor
        shard = head.logits if head else self.model.logits(hidden)  # [S, vocab / tp], padded alike on all ranks
        shard = shard.to(self.sampler.device)
        masks = self._token_masks.of(scheduled.sampled_rows, step)  # waits, while the device computes
        logprobs, failed = None, list[int]()
        if not self._greedy[scheduled.sampled_rows].all():
            ids, logprobs, failed = self._sample_whole(shard, scheduled, masks)
        elif masks is not None:
            masks.apply(shard, tensor.rank * shard.shape[-1])
            ids = tp_argmax(shard, tensor)
        else:
            ids = head.argmax(tensor) if head else tp_argmax(shard, tensor)
        if heads is not None:
            chosen = self.model.choose(hidden, ids.to(self.device), self._upload.send([heads])[0])
            ids = tensor.broadcast(chosen, 0).to(ids.device)  # rounding may differ between ranks
        newest = self._keep(sampled_rows, ids.to(self.device), scheduled)
        if not self.mesh.first:
            self.mesh.feedback.isend(ids, 0)
        counts = scheduled.sampled[scheduled.samples] if scheduled.query_len > 1 else None
        return DeviceOutput(ids, logprobs, failed=failed, counts=counts, newest=newest)

    def _sample_whole(self, shard: Tensor, scheduled: ScheduledBatch, masks: RowMasks | None) -> Sampled:
        """Sample from the whole vocabulary on one rank and broadcast the ids, as rounding may differ between ranks."""
        logits = self.mesh.tensor.all_gather(shard.contiguous())  # [tp, S, vocab / tp]
        rows = scheduled.sampled_rows
        if self._samples_here:
            logits = logits.permute(1, 0, 2).reshape(len(rows), -1)[:, : self.model.vocab_size]
            sampled = self.sampler.sample(logits, rows, scheduled.sampled_outputs, masks)
        else:
            sampled = Sampled(torch.empty(len(rows), dtype=torch.int64, device=shard.device), None, [])
        return sampled._replace(ids=self.mesh.tensor.broadcast(sampled.ids, 0))

    def _owed(self, rows: np.ndarray) -> int:
        """On the first of several stages: how many steps' ids must be received before these rows can be computed."""
        owed = [i + 1 for i, (step, _) in enumerate(self._awaited) if np.isin(rows, step.sampled_rows).any()]
        return owed[-1] if owed else 0

    def _receive_ids(self, steps: int) -> None:
        """Receive the ids of the oldest steps from the last stage, as late as possible, so that no stage idles."""
        for _ in range(steps):
            scheduled, rows = self._awaited.popleft()
            ids = torch.empty(len(rows), dtype=torch.int64, device=self.device)
            self.mesh.feedback.recv(ids, self.mesh.stages - 1)
            self._keep(rows, ids, scheduled)

    def _keep(self, rows: Tensor, ids: Tensor, scheduled: ScheduledBatch) -> Tensor | None:
        """Keep each row's newest token. rows, ids: of all sampled tokens. Returns the newest ones' indices among these,
        [R]; None: each row has one."""
        if scheduled.query_len == 1:
            self._last[rows, 0] = ids
            return None
        newest = self._newest(rows, ids, scheduled)
        self._last[rows[newest], 0] = ids[newest]
        return newest

    def _newest(self, rows: Tensor, ids: Tensor, scheduled: ScheduledBatch) -> Tensor:
        """[R] index among the sampled tokens, ids [S], of each row's newest one. A row with drafts has those up to the
        first that differs from the token sampled before it, which takes its place."""
        assert scheduled.drafts is not None and scheduled.newest_sampled is not None
        newest, drafts = self._upload.send([scheduled.newest_sampled, scheduled.drafts])
        count, query_len = len(drafts), scheduled.query_len
        if (scheduled.drafts == protocol.MADE).any():
            made = self._last[rows[: count * query_len : query_len], 1:query_len]
            drafts = torch.where(drafts == protocol.MADE, made, drafts)
        kept = (ids[: count * query_len].view(count, query_len)[:, :-1] == drafts).cumprod(1).sum(1)
        newest[:count] += kept - (query_len - 1)
        return newest
