"""Which sequences compute how many tokens in the next step.

There is no prefill phase and no decode phase. A sequence has `num_computed` tokens and wants to reach `length`; every
step spends one token budget over all of them, running ones first. Chunked prefill, prefix-cache hits and preemption
are all that one rule.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from .. import protocol
from .blocks import Blocks, Hash
from .sequence import Sequence


@dataclass(slots=True)
class ScheduledStep:
    """A plan together with what the lead must remember to read its result."""

    plan: protocol.Plan
    sampled: list[Sequence]  # in the order in which the result's tokens come


@dataclass(slots=True)
class Counters:
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    chunks: int = 0
    aborted: int = 0


class _Work(NamedTuple):
    sequence: Sequence
    tokens: int  # to compute
    samples: bool  # its last known token is among them


@dataclass(slots=True)
class _Draft:
    """A plan while it is being written."""

    work: list[_Work] = field(default_factory=list)
    new: list[protocol.NewSequence] = field(default_factory=list)
    block_rows: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    offered: set[int] = field(default_factory=set)  # blocks that this step fills


class Scheduler:
    """First come, first served within a priority; a lower priority number goes first.

    Admission cannot deadlock: `max_model_len` tokens fit in the pool, so the sequence that goes first can always run
    to its end once those that go later have been preempted, and it is never preempted itself.
    """

    def __init__(self, blocks: Blocks, max_num_seqs: int, token_budget: int, max_model_len: int, stages: int = 1):
        self.blocks = blocks
        self.stages = stages
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.token_budget = token_budget
        self.counters = Counters()
        self.running: list[Sequence] = []  # sorted by order, as is waiting
        self.waiting: list[Sequence] = []
        self._by_id: dict[str, Sequence] = {}
        self._rows = list(range(max_num_seqs))  # a heap: low rows first
        self._freed: list[int] = []  # rows to announce with the next plan
        self.backlog = 0  # tokens that all sequences have to compute, as far as that is known
        self._step = 0
        self._arrivals = 0

    # -- requests

    def add(self, request: protocol.Request, hashes: Iterable[Hash] = (), expected: int = 0) -> None:
        """hashes: of the prompt's full blocks, where they are known already. expected: how many of the prompt's tokens
        will probably be in the prefix cache.

        Raises ValueError for a sequence that can become longer than max_model_len: it might never be admitted.
        """
        length = len(request.tokens) // 4 + request.sampling.max_tokens
        if length > self.max_model_len or request.id in self._by_id:
            raise ValueError(f"{request.id}: up to {length} tokens, at most {self.max_model_len} fit, or a used id")
        self._arrivals += 1
        sequence = Sequence(request, self._arrivals, list(hashes))
        self._by_id[sequence.id] = sequence
        sequence.expected = expected
        self.backlog += sequence.remaining - expected
        bisect.insort(self.waiting, sequence, key=_order)

    def abort(self, ids: Iterable[str]) -> None:
        """Forget these sequences; ids that have ended already are no error, the word may have crossed the end."""
        for name in ids:
            sequence = self._by_id.get(name)
            if sequence is not None:
                self.counters.aborted += 1
                self._finish(sequence)

    @property
    def idle(self) -> bool:
        return not self._by_id

    @property
    def open(self) -> int:
        """Sequences that have not ended."""
        return len(self._by_id)

    # -- planning

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None when nothing can be computed before outstanding results arrive."""
        draft = _Draft()
        budget = self._schedule_running(draft, self.token_budget)
        self._admit(draft, budget)
        if not draft.work:
            return None
        return self._write(draft)

    def _schedule_running(self, draft: _Draft, budget: int) -> int:
        """Spend the budget in order, one token kept back for each decoding sequence, so that a long prompt cannot
        stall the others; returns what is left."""
        turn = self._turn()
        reserved = len(turn)
        budget = max(budget, reserved + 1)  # more sequences than budget: all go on, and prompts get through
        for sequence in list(self.running):
            if sequence.row < 0 or sequence.ends_by_length:  # preempted just now; or only its result is awaited
                continue
            if sequence.remaining == 1:
                if sequence.id not in turn:
                    continue
                reserved -= 1
            count = min(sequence.remaining, budget - reserved)
            if count > 0 and self._grow(sequence, count, draft):
                self._work(sequence, count, draft)
                budget -= count
        return budget - reserved

    def _turn(self) -> set[str]:
        """The decoding sequences of the next step.

        With one stage all of them. With more, a sequence's next token can be computed only once the last stage has
        sampled this one, so each is in one of `stages` steps, as many in each: while the last stage computes one part
        of them, the first computes another. Where there is no other work, waiting has no use and all may go.
        """
        decoding = [s for s in self.running if s.remaining == 1 and not s.ends_by_length]
        if self.stages > 1:
            most = -(-len(decoding) // self.stages)
            due = [s for s in decoding if not s.in_flight or self._step + 1 - s.sampled_at >= self.stages]
            if not due and all(s.remaining <= 1 for s in self.running):
                due = [s for s in decoding if s.in_flight < 2]  # more would only be wasted when it ends
            decoding = due[:most]
        return {s.id for s in decoding}

    def _grow(self, sequence: Sequence, count: int, draft: _Draft) -> bool:
        """Give it the blocks for `count` more tokens, preempting those that go later; False if it was itself preempted.

        Sequences are served in order, so a victim is never part of the draft yet.
        """
        needed = self._blocks_for(sequence.num_computed + count) - len(sequence.blocks)
        while needed > self.blocks.free:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        for block in self.blocks.take(max(0, needed)):
            sequence.blocks.append(block)
            draft.block_rows.append(sequence.row)
            draft.block_ids.append(block)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Take its row and blocks; it waits and is computed again later, from what the prefix cache still holds."""
        self.running.remove(sequence)
        self._leave_row(sequence)
        self.backlog += sequence.num_computed
        sequence.num_computed = 0
        bisect.insort(self.waiting, sequence, key=_order)
        self.counters.preemptions += 1

    def _admit(self, draft: _Draft, budget: int) -> None:
        """Waiting sequences in their order; the first that does not fit holds the others back."""
        while budget > 0 and self.waiting and self._rows:
            sequence = self.waiting[0]
            if sequence.in_flight:  # preempted with an id still on its way; it must be known to be computed again
                break
            sequence.extend_hashes(self.blocks.size)
            # The last token is always computed: its logits are what the sequence came for.
            usable = (len(sequence.tokens) - 1) // self.blocks.size
            if sequence.sampling.pooling == "mean":  # all of its hidden states are needed, and none are kept
                usable = 0
            hits = self.blocks.match(sequence.hashes[:usable])
            computed = len(hits) * self.blocks.size
            count = min(sequence.length - computed, budget)
            # A step of one-token rows alone writes and reads in one kernel: none may read what another one writes.
            single = count == 1 and all(work.tokens == 1 for work in draft.work)
            while single and any(block in draft.offered for block in hits):
                hits.pop()
                computed -= self.blocks.size
                count = min(sequence.length - computed, budget)
            needed = self._blocks_for(computed + count) - len(hits)
            spare = len(self.running)  # a block for each running sequence, or it would preempt the newcomer at once
            if needed + spare > self.blocks.free - self.blocks.unheld(hits):
                break
            self.waiting.pop(0)
            self.blocks.hold(hits)
            sequence.blocks = hits + self.blocks.take(needed)
            sequence.row = heapq.heappop(self._rows)
            sequence.num_computed = computed
            self.backlog += sequence.expected - computed
            sequence.expected = 0
            sequence.published = len(hits)
            if sequence.cached_tokens < 0:
                sequence.cached_tokens = computed
                self.counters.prompt_tokens += sequence.prompt_len
                self.counters.cached_tokens += computed
            draft.new.append(self._introduce(sequence))
            bisect.insort(self.running, sequence, key=_order)
            self._work(sequence, count, draft)
            budget -= count

    def _introduce(self, sequence: Sequence) -> protocol.NewSequence:
        return protocol.NewSequence(
            row=sequence.row,
            tokens=protocol.pack_u32(sequence.tokens),
            prompt_len=sequence.prompt_len,
            num_computed=sequence.num_computed,
            blocks=protocol.pack_u32(sequence.blocks),
            sampling=sequence.sampling,
        )

    def _work(self, sequence: Sequence, count: int, draft: _Draft) -> None:
        sequence.num_computed += count
        samples = sequence.num_computed == sequence.length
        self.backlog += samples - count
        if samples:
            sequence.in_flight += 1
            sequence.sampled_at = self._step + 1
        self.counters.chunks += not samples
        draft.work.append(_Work(sequence, count, samples))
        before = sequence.published
        self._publish(sequence)
        if sequence.published > before:  # once in a block's tokens
            draft.offered.update(sequence.blocks[before : sequence.published])

    def _publish(self, sequence: Sequence) -> None:
        """Offer full blocks of known tokens to the prefix cache.

        A block is offered when the step that fills it is planned: plans are executed in order, and within a step keys
        and values are written before any sequence reads them, except where all have one token, which _admit minds. A
        generated token's id must be known, hence `hashes`.
        """
        if not self.blocks.prefix_cache:
            return
        sequence.extend_hashes(self.blocks.size)
        full = min(sequence.num_computed // self.blocks.size, len(sequence.hashes))
        for i in range(sequence.published, full):
            self.blocks.publish(sequence.blocks[i], sequence.hashes[i])
        sequence.published = max(sequence.published, full)

    def _write(self, draft: _Draft) -> ScheduledStep:
        self._step += 1
        self.counters.steps += 1
        work = sorted(draft.work, key=lambda w: w.tokens > 1)  # one-token rows first; the sort is stable
        plan = protocol.Plan(
            step=self._step,
            rows=protocol.pack_u16([w.sequence.row for w in work]),
            counts=protocol.pack_u32([w.tokens for w in work if w.tokens > 1]),
            new=draft.new,
            freed=protocol.pack_u16(self._freed),
            block_rows=protocol.pack_u16(draft.block_rows),
            block_ids=protocol.pack_u32(draft.block_ids),
        )
        self._freed = []
        return ScheduledStep(plan, [w.sequence for w in work if w.samples])

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.blocks.size)

    # -- results

    def update(self, done: ScheduledStep, outcome: protocol.StepOutput) -> list[protocol.Delta]:
        """Add a step's sampled ids, one for each of done.sampled, and end what has ended."""
        deltas = []
        ids, logprobs = protocol.unpack_u32(outcome.ids).tolist(), outcome.logprobs
        for i, (sequence, token) in enumerate(zip(done.sampled, ids, strict=True)):
            sequence.in_flight -= 1
            if sequence.finished:  # ended or aborted after this step was planned; the token is not shown or counted
                continue
            sequence.tokens.append(token)
            finish, stop = self._judge(sequence, token)
            if sequence.row >= 0:
                self._publish(sequence)
            shown = [] if stop >= 0 else [token]
            self.counters.output_tokens += not sequence.sampling.pooling
            deltas.append(
                protocol.Delta(
                    id=sequence.id,
                    tokens=shown,
                    logprobs=[logprobs[i]] if shown and i in logprobs else [],
                    finish=finish,
                    stop_token=stop,
                    cached_tokens=0 if sequence.reported else sequence.cached_tokens,
                    embedding=outcome.embeddings.get(i, b""),
                )
            )
            sequence.reported = True
            if finish:
                self._finish(sequence)
        return deltas

    def _judge(self, sequence: Sequence, token: int) -> tuple[str, int]:
        outputs = len(sequence.tokens) - sequence.prompt_len
        if token in sequence.sampling.stop_token_ids and outputs > sequence.sampling.min_tokens:
            return "stop", token
        if outputs >= sequence.sampling.max_tokens:
            return "length", -1
        return "", -1

    def _finish(self, sequence: Sequence) -> None:
        del self._by_id[sequence.id]
        self.backlog -= sequence.remaining - sequence.expected
        sequence.finished = True
        if sequence.row >= 0:
            self.running.remove(sequence)
            self._leave_row(sequence)
        else:
            self.waiting.remove(sequence)

    def _leave_row(self, sequence: Sequence) -> None:
        heapq.heappush(self._rows, sequence.row)
        self._freed.append(sequence.row)
        sequence.row = -1
        self.blocks.release(sequence.blocks)
        sequence.blocks = []

    # -- for the curious

    def check_empty(self) -> None:
        """Raise RuntimeError unless all counts are those of a scheduler without sequences; in constant time."""
        self.blocks.check_empty()
        if len(self._rows) != self.max_num_seqs:
            raise RuntimeError(f"row accounting is broken: {len(self._rows)} of {self.max_num_seqs} rows are free")
        if self.running or self.waiting or self.backlog:
            listed = f"{len(self.running)} run, {len(self.waiting)} wait"
            raise RuntimeError(f"no sequence is left, but {listed}, and {self.backlog} tokens are to be computed")

    def check(self) -> None:
        """Raise RuntimeError unless rows and blocks add up."""
        for _ in self.audit():
            pass

    def audit(self) -> Iterator[None]:
        """`check`, a slice of blocks at a time. No step may be planned before its end; it may be dropped."""
        rows = [s.row for s in self.running]
        if len(set(rows)) != len(rows) or set(rows) & set(self._rows):
            raise RuntimeError(f"row accounting is broken: {sorted(rows)}")
        if self.backlog != sum(s.remaining - s.expected for s in self._by_id.values()):
            raise RuntimeError(f"the backlog of {self.backlog} tokens is not what the sequences have to compute")
        yield from self.blocks.audit(s.blocks for s in self.running)

    def stats(self) -> protocol.Stats:
        return protocol.Stats(
            running=len(self.running),
            waiting=len(self.waiting),
            blocks_total=self.blocks.count,
            blocks_used=self.blocks.used,
            blocks_cached=self.blocks.cached,
            **asdict(self.counters),
        )


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
