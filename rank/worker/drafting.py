"""Runs a draft model on one rank of the last pipeline stage: over each step's tokens, and on from them.

It runs once the target has sampled, in steps that want drafts or have it follow, which all with prompts do. Of the
tokens of other steps it has no keys and values: older ones or zeros are in their places, which makes drafts worse until
it has followed some more tokens (docs/measurements/speculation.md). A draft is chosen as the target
chooses: the largest of logits plus noise that is a hash of seed, position and token. Where both make much the same
logits, both choose the same token, also at a temperature (coupling by Gumbel noise). Its drafts never change a text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ...comm.base import Comm
from ...kernels.cpp import ops
from ...kernels.cpp.graph import Graph, Memory, capture
from ...kernels.gemm.cpu_gemm import MAX_ROWS
from ..model.batch import Batch, StepArrays
from ..model.cache_spec import Caches
from ..model.drafts import DraftSource
from .cpu_graphs import Head
from .draft_graphs import DraftGraphs
from .graphs import DecodeGraphs
from .sampler import Sampler, tp_argmax
from .state import BatchState, ScheduledBatch
from .upload import Upload

log = logging.getLogger("phalanx")
T = TypeVar("T")
GoOn = Callable[[Tensor, int, Tensor | None], Tensor]  # of ids [R], tokens behind the newest one, and [R, hidden]
CHANGING = "ids", "positions", "slots", "block_tables", "lengths", "rows"  # of a Batch, from step to step


class DraftStep(NamedTuple):
    """A step of T tokens that the target has computed, of which R rows sample."""

    batches: list[Batch]  # one, or two microbatches
    scheduled: ScheduledBatch
    hidden: Tensor  # [T, hidden], as Model.forward returns them
    next_ids: Tensor  # [T] int64, the token that follows each; behind a rejected draft they mean nothing
    newest: Tensor  # [R] int64, index of the token behind which the row's newest one was sampled
    rows: Tensor  # [R] int64
    lengths: Tensor  # [R] int64, tokens of the row: the newest one has no keys and values yet
    wanted: int  # drafts of each of these rows
    replayed: bool = False  # `batches` and `hidden` are a captured step's: their memory stays where it is


class Recorded:
    """A draft model's steps of decoding rows on a CPU, which are recorded when they first occur, and replayed."""

    def __init__(self, source: DraftSource):
        self.source = source
        self._memory = Memory()
        self._able = True
        self._followed: dict[tuple[int, int], tuple[Graph, Tensor, Tensor]] = {}  # by tokens, and place of the target's
        self._chains: dict[int, _Chain] = {}  # by rows
        self._heads: dict[int, tuple[Graph, Tensor, Head]] = {}

    def follow(self, step: DraftStep, own: Callable[[Batch, Tensor], Batch]) -> Tensor:
        """The source's [T, hidden] of a captured step's tokens. Valid until the next step."""
        (batch,), source = step.batches, self.source
        key = len(batch.ids), step.hidden.data_ptr()
        if key in self._followed:
            graph, ids, made = self._followed[key]
            ids.copy_(step.next_ids if source.FOLLOWS else batch.ids)
            graph.replay()
            return made
        ids = (step.next_ids if source.FOLLOWS else batch.ids).clone()

        def compute() -> Tensor:
            return source.forward(own(batch, ids), source.read(step.hidden) if source.FOLLOWS else None)

        made, recorded = self._capture(compute)
        if recorded is not None:
            self._followed[key] = recorded, ids, made
        return made

    def go_on(self, batch: Batch, before: Tensor | None) -> Tensor:
        """The source's [R, hidden] of one token of each row. Valid until the next ones."""
        chain = self._chains.get(len(batch.ids))
        if chain is None or chain.graph is None:
            if not self._able:
                return self.source.forward(batch, before)
            kept = self._chains[len(batch.ids)] = chain = _Chain(batch, before)
            kept.made, kept.graph = self._capture(lambda: self.source.forward(kept.batch, kept.before))
            return kept.made
        chain.fill(batch, before)
        chain.graph.replay()
        return chain.made

    def head(self, hidden: Tensor) -> Head | None:
        """The logits of rows [R, hidden]. Valid until the next ones."""
        count = len(hidden)
        if count not in self._heads:
            given = hidden.clone()
            found, recorded = self._capture(lambda: Head(self.source.logits(given), self._memory))
            if recorded is None:
                return None
            self._heads[count] = recorded, given, found
            return found
        graph, given, found = self._heads[count]
        given.copy_(hidden)
        graph.replay()
        return found

    def _capture(self, compute: Callable[[], T]) -> tuple[T, Graph | None]:
        if not self._able:
            return compute(), None
        made, graph, reason = capture(compute, self._memory)
        if graph is None:
            self._able = False
            log.debug("drafts are not recorded, as %s", reason)
        return made, graph


class _Chain:
    """The inputs of a recorded step of one token of each row, and what it makes."""

    def __init__(self, batch: Batch, before: Tensor | None):
        copies = {name: getattr(batch, name).clone() for name in CHANGING}
        self.batch, self.before = replace(batch, **copies), None if before is None else before.clone()
        self.graph: Graph | None = None
        self.made: Tensor

    def fill(self, batch: Batch, before: Tensor | None) -> None:
        for name in CHANGING:
            getattr(self.batch, name).copy_(getattr(batch, name))
        if self.before is not None and before is not None:
            self.before.copy_(before)


class Drafting:
    def __init__(
        self, source: DraftSource, state: BatchState, caches: Caches, upload: Upload, tensor: Comm, sampler: Sampler,
        greedy: np.ndarray,
    ):  # fmt: skip
        """caches: of the source's layers, the last ones of the state's. greedy: [rows] bool, whether the row's next
        token is the argmax of the unchanged logits."""
        self.source, self.state, self.caches, self.upload = source, state, caches, upload
        self.tensor, self.sampler, self.greedy = tensor, sampler, greedy
        self._layer_groups = list(state.layer_groups)[-len(caches) :]
        on_cpu = sampler.device.type == "cpu" and ops.available()
        self.recorded = Recorded(source) if on_cpu else None  # None: nothing is replayed on a CPU
        self._graphs: DraftGraphs | None = None  # on a GPU

    def capture(self, target: DecodeGraphs, reached: Callable[[int], None]) -> None:
        """Capture drafts behind steps that the target replays. Calls reached(sizes done)."""
        self._graphs = DraftGraphs(self.source, target, self._own, self.upload, self.state.block_size)
        self._graphs.capture(reached)

    def close(self) -> None:
        """Free what was captured, before the communicators end."""
        self._graphs = None

    def step(self, step: DraftStep) -> Tensor | None:
        """Drafts [R, wanted] int64, equal on all ranks of the tensor group; None where no row samples or none are
        wanted: then it has read the step's tokens. Collective over the group."""
        graphs, query_len = self._graphs, step.scheduled.query_len
        if step.replayed and graphs is not None and graphs.supports(len(step.rows), query_len):
            made = graphs.follow(query_len, step.next_ids, step.newest, self._most(step.scheduled.rows))
            return self._chain(step, made, lambda ids, number, before: graphs.go_on(ids)) if step.wanted else None
        made = self._follow(step)
        if not len(step.rows) or not step.wanted:
            return None
        return self._chain(step, made[step.newest] if self.source.FOLLOWS else None, self._goes_on(step))

    def _follow(self, step: DraftStep) -> Tensor:
        """The source's [T, hidden] of the step's tokens."""
        source, counts = self.source, [len(batch.ids) for batch in step.batches]
        if step.replayed and self.recorded is not None:
            return self.recorded.follow(step, self._own)
        ids = step.next_ids.split(counts) if source.FOLLOWS else [batch.ids for batch in step.batches]
        before = source.read(step.hidden).split(counts) if source.FOLLOWS else [None] * len(counts)
        made = [
            source.forward(self._own(batch, own), one)
            for batch, own, one in zip(step.batches, ids, before, strict=True)
        ]
        return torch.cat(made) if len(made) > 1 else made[0]

    def _own(self, batch: Batch, ids: Tensor) -> Batch:
        """The batch as the source's layers read it."""
        further = [replace(one, ids=ids, caches=self.caches, sampled=None, scratch={}) for one in batch.further]
        return replace(
            batch, ids=ids, caches=self.caches, sampled=None, embeddings=None, replayed=None, scratch={},
            further=further, layer_groups=self._layer_groups,
        )  # fmt: skip

    def _chain(self, step: DraftStep, hidden: Tensor | None, go_on: GoOn) -> Tensor:
        """hidden: what the source has computed of rows' newest tokens [R, hidden]; None: it reads those yet."""
        rows = step.scheduled.rows[step.scheduled.samples]
        (prompts,) = self.upload.send([self.state.prompt_len[rows]])
        outputs, ids, drafts = step.lengths - prompts, step.next_ids[step.newest], list[Tensor]()
        for number in range(step.wanted):
            if number or hidden is None:
                hidden = go_on(ids, number - self.source.FOLLOWS, hidden)
            ids = self._choose(hidden, rows, outputs + number)
            drafts.append(ids)
        return torch.stack(drafts, 1)

    def _goes_on(self, step: DraftStep) -> GoOn:
        """`forward` of one token of each row, where it is not captured."""
        scheduled = step.scheduled
        rows = scheduled.rows[scheduled.samples]
        computed = (scheduled.starts + scheduled.counts)[scheduled.samples]  # at most, as drafts may be rejected
        tables = [self.state.table[self.state.rows_of(rows, group)] for group in range(len(self.state.groups))]
        most, *on_device = self.upload.send([self._most(rows), *tables])

        def go_on(ids: Tensor, further: int, before: Tensor | None) -> Tensor:
            positions = torch.minimum(step.lengths - 1 + further, most)
            batch = self._batch(ids, positions, step.rows, on_device, computed + 1 + further)
            if self.recorded is not None and not batch.further and len(batch.ids) <= MAX_ROWS:
                return self.recorded.go_on(batch, before)
            return self.source.forward(batch, before)

        return go_on

    def _most(self, rows: np.ndarray) -> np.ndarray:
        """[R] the last positions for which these rows have blocks, and the source has rotary embeddings. Tokens behind
        it are computed there, as drafts that mean nothing: so nothing of another sequence is overwritten."""
        blocks = [self.state.num_blocks[self.state.rows_of(rows, group)] for group in range(len(self.state.groups))]
        return np.minimum(np.minimum.reduce(blocks) * self.state.block_size, self.source.max_model_len) - 1

    def _batch(self, ids: Tensor, positions: Tensor, rows: Tensor, tables: list[Tensor], bounds: np.ndarray) -> Batch:
        """One token of each row, at these positions. bounds: of lengths, as the host knows them."""
        size = self.state.block_size
        places = [(one.gather(1, positions[:, None] // size)[:, 0] * size + positions % size, one) for one in tables]
        lengths = (positions + 1).int()
        kv_lens = (lengths if lengths.device.type == "cpu" else bounds).tolist()
        starts = torch.arange(len(ids) + 1, dtype=torch.int32, device=ids.device)
        (slots, table), *further = places
        arrays = StepArrays(positions, slots, table, lengths, rows, starts, starts[:-1].long())
        batch = Batch.of(ids, arrays, [1] * len(ids), kv_lens, self.caches)
        batch.add_groups(further, self._layer_groups)
        return batch

    def _choose(self, hidden: Tensor, rows: np.ndarray, outputs: Tensor) -> Tensor:
        """A token of each row [R], as the target chooses its `outputs`-th one [R]."""
        head = self.recorded.head(hidden) if self.recorded is not None and len(rows) <= MAX_ROWS else None
        shard = self.source.logits(hidden) if head is None else head.logits
        split, group = self.source.tensor.size > 1, self.source.tensor
        if self.greedy[rows].all():
            ids = self._targets(tp_argmax(shard, group) if head is None else head.argmax(group))
            return ids if split else self.tensor.broadcast(ids, 0)  # rounding may differ between ranks
        logits = group.all_gather(shard.contiguous()).permute(1, 0, 2).flatten(1) if split else shard
        ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        if self.tensor.rank == 0:
            ids = self.sampler.propose(self._spread(logits), rows, outputs)
        return self.tensor.broadcast(ids, 0)

    def _targets(self, ids: Tensor) -> Tensor:
        """Ids of the source's vocabulary as the target's."""
        return ids if self.source.vocabulary is None else self.source.vocabulary[ids]

    def _spread(self, logits: Tensor) -> Tensor:
        """Logits of the target's vocabulary. Tokens that the source does not know have none."""
        size, known = self.sampler.vocab_size, self.source.vocabulary
        if known is None:
            return logits[:, :size]
        return logits.new_full((len(logits), size), -torch.inf).index_copy_(1, known, logits[:, : len(known)])
