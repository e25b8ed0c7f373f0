"""The scheduler: decides which sequences compute how many tokens in the next step.

There is no prefill phase and no decode phase. A sequence has `num_computed` tokens and wants to reach `length`. Every
step spends one token budget over all sequences, running ones first. Chunked prefill, prefix-cache hits and preemption
all follow from that one rule.
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict

from .. import protocol
from .blocks import IN_HOST, Blocks, Hash
from .counters import Counters
from .grammar import Grammar
from .sequence import Sequence
from .step import PlannedStep, ScheduledStep


class Scheduler:
    """Schedules one replica. Within a priority, first come is first served; a lower priority number goes first.

    Admission cannot deadlock. The pool holds `max_model_len` tokens, so the first sequence in order can always run to
    its end once later ones are preempted. It is never preempted itself.
    """

    def __init__(self, blocks: Blocks, max_num_seqs: int, token_budget: int, max_model_len: int, stages: int = 1):
        self.blocks = blocks
        self.stages = stages
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.token_budget = token_budget
        self.counters = Counters()
        self.running: list[Sequence] = []  # sorted by Sequence.order, as is `waiting`
        self.waiting: list[Sequence] = []
        self._by_id: dict[str, Sequence] = {}
        self._free_rows = list(range(max_num_seqs))  # a heap: low rows first
        self._freed_rows: list[int] = []  # rows to announce with the next plan
        self.backlog = 0  # tokens that all sequences still have to compute, as far as is known
        self._step = 0
        self._arrivals = 0

    # -- requests

    def add(
        self, request: protocol.Request, hashes: Iterable[Hash] = (), expected: int = 0, grammar: Grammar | None = None
    ) -> None:
        """Queue a request. hashes: of the prompt's full blocks, as far as they are known. expected: how many of the
        prompt's tokens will probably be in the prefix cache. grammar: the request's, compiled.

        Raises ValueError for a used id, and for a sequence that may outgrow max_model_len: it might never be admitted.
        """
        length = len(request.tokens) // 4 + request.sampling.max_tokens
        if length > self.max_model_len or request.id in self._by_id:
            raise ValueError(f"{request.id}: up to {length} tokens, at most {self.max_model_len} fit, or a used id")
        self._arrivals += 1
        sequence = Sequence(request, self._arrivals, list(hashes), grammar)
        self._by_id[sequence.id] = sequence
        sequence.expected = expected
        self.backlog += sequence.remaining - expected
        bisect.insort(self.waiting, sequence, key=_order)

    def abort(self, ids: Iterable[str]) -> None:
        """Drop these sequences. Unknown ids are no error: a sequence may end while the message is on its way."""
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
        step = PlannedStep()
        budget = self._schedule_running(step, self.token_budget)
        self._admit(step, budget)
        if not step.decodes and not step.chunks:
            return None
        return self._make_plan(step)

    def _schedule_running(self, step: PlannedStep, budget: int) -> int:
        """Spend the budget over the running sequences in order. Returns what is left.

        One token is reserved for each decoding sequence, so that a long prompt cannot stall the others.
        """
        group = self._decode_group()
        reserved = len(group)
        # With more sequences than budget all still decode, and a prompt gets one token.
        budget = max(budget, reserved + 1)
        for sequence in list(self.running):
            if sequence.row < 0 or sequence.ends_by_length:  # preempted in this call; or only its last id is awaited
                continue
            remaining = sequence.remaining
            if remaining == 1:
                if sequence.id not in group:
                    continue
                reserved -= 1
            count = min(remaining, budget - reserved)
            if count > 1:
                count = sequence.chunk(sequence.num_computed, count)
            if count > 0 and self._grow(sequence, count, step):
                self._add_chunk(sequence, count, step)
                budget -= count
        return budget - reserved

    def _decode_group(self) -> set[str]:
        """The ids of the decoding sequences of the next step.

        With one pipeline stage these are all. With more, a sequence's next token needs the one that the last stage has
        yet to sample. So the sequences are divided evenly over `stages` steps: while the last stage computes one
        group, the first computes another. Where there is no other work, waiting gains nothing and all may go.
        """
        decoding = [s for s in self.running if s.remaining == 1 and not s.ends_by_length]
        if self.stages > 1:
            most = -(-len(decoding) // self.stages)
            due = [s for s in decoding if not s.in_flight or self._step + 1 - s.sampled_at >= self.stages]
            if not due and all(s.remaining <= 1 for s in self.running):
                due = [s for s in decoding if s.in_flight < 2]  # more steps ahead would be wasted when it ends
            decoding = due[:most]
        return {s.id for s in decoding}

    def _grow(self, sequence: Sequence, count: int, step: PlannedStep) -> bool:
        """Allocate the blocks for `count` more tokens and preempt later sequences if needed.

        Returns False if the sequence itself was preempted. Sequences are served in order, so a preempted one is never
        part of the step yet.
        """
        needed = self._blocks_for(sequence.num_computed + count) - len(sequence.blocks)
        if needed <= 0:
            return True
        while needed > self.blocks.num_free:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        for block in self.blocks.allocate(needed):
            sequence.blocks.append(block)
            step.block_rows.append(sequence.row)
            step.block_ids.append(block)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Free its row and blocks and queue it again. Later it recomputes what the prefix cache no longer has."""
        self.running.remove(sequence)
        self._free_row(sequence)
        self.backlog += sequence.num_computed
        sequence.num_computed = 0
        bisect.insort(self.waiting, sequence, key=_order)
        self.counters.preemptions += 1

    def _admit(self, step: PlannedStep, budget: int) -> None:
        """Admit waiting sequences in order, until one does not fit."""
        while budget > 0 and self.waiting and self._free_rows:
            sequence = self.waiting[0]
            if sequence.in_flight:  # preempted while an id was on its way; that id is needed to compute it again
                break
            hits, count = self._find_prefix(sequence, step, budget)
            computed = len(hits) * self.blocks.size
            needed, in_host = self._blocks_for(computed + count) - len(hits), IN_HOST in hits
            spare = len(self.running)  # a block for each: without it the new one would soon be preempted
            full = needed + spare > self.blocks.num_free - self.blocks.num_unreferenced(hits)
            if full or (in_host and self.blocks.tier.busy):
                break
            self.waiting.pop(0)
            self.counters.swapped_in += in_host and sequence.cached_tokens >= 0
            sequence.blocks = self.blocks.hold(hits, sequence.hashes) + self.blocks.allocate(needed)
            sequence.row = heapq.heappop(self._free_rows)
            sequence.num_computed = computed
            if hits:
                self.blocks.snapshots.load(sequence.hashes[len(hits) - 1], sequence.row)
            self.backlog += sequence.expected - computed
            sequence.expected = 0
            sequence.num_cached_blocks = len(hits)
            if sequence.cached_tokens < 0:
                sequence.cached_tokens = computed
                self.counters.prompt_tokens += sequence.prompt_len
                self.counters.cached_tokens += computed
            step.new.append(sequence.introduced())
            bisect.insort(self.running, sequence, key=_order)
            self._add_chunk(sequence, count, step)
            budget -= count

    def _find_prefix(self, sequence: Sequence, step: PlannedStep, budget: int) -> tuple[list[int], int]:
        """The cached blocks that a waiting sequence begins with, and how many tokens it then computes."""
        if self.blocks.prefix_cache:
            sequence.extend_hashes(self.blocks.size)
        usable = sequence.hashes[: sequence.usable_blocks(self.blocks.size)]
        hits = self.blocks.match(usable)
        ends = len(hits), (sequence.prompt_len - 1) // self.blocks.size, len(usable)  # where it leaves state snapshots
        while True:
            self.blocks.snapshots.trim(hits, usable)
            borders = self.blocks.snapshots.borders(len(hits), *ends)
            sequence.borders = [border * self.blocks.size for border in borders]
            computed = len(hits) * self.blocks.size
            count = sequence.chunk(computed, min(sequence.length - computed, budget))
            # Where all rows have one token, one kernel writes and reads the cache: none may read what another writes.
            single = count == 1 and not step.chunks
            if not single or not any(block in step.cached for block in hits):
                return hits, count
            hits.pop()

    def _add_chunk(self, sequence: Sequence, count: int, step: PlannedStep) -> None:
        sequence.num_computed += count
        samples = sequence.num_computed == sequence.length
        self.backlog += samples - count
        if samples:
            sequence.length += 1
            sequence.sampled_at = self._step + 1
        self.counters.chunks += not samples
        if count == 1:
            step.decodes.append(sequence)
        else:
            step.chunks.append((sequence, count))
        before = sequence.num_cached_blocks
        self._cache_blocks(sequence)
        if sequence.num_cached_blocks > before:  # true once per block
            step.cached.update(sequence.blocks[before : sequence.num_cached_blocks])
        if sequence.num_computed in sequence.borders:
            self.blocks.snapshots.save(sequence.row, sequence.hashes[sequence.num_computed // self.blocks.size - 1])

    def _cache_blocks(self, sequence: Sequence) -> None:
        """Enter full blocks of known tokens into the prefix cache.

        That happens when the step that fills a block is planned. It is safe: plans are executed in order, and a step
        writes keys and values before any sequence reads them. `_admit` handles the exception, steps in which all rows
        have one token. Only blocks with a hash are entered, as a generated token's id must be known.
        """
        if not self.blocks.prefix_cache:
            return
        full = min(sequence.num_computed, len(sequence.tokens)) // self.blocks.size
        if full <= sequence.num_cached_blocks:
            return
        sequence.extend_hashes(self.blocks.size)
        for i in range(sequence.num_cached_blocks, full):
            self.blocks.cache(sequence.blocks[i], sequence.hashes[i])
        sequence.num_cached_blocks = full

    def _make_plan(self, step: PlannedStep) -> ScheduledStep:
        self._step += 1
        self.counters.steps += 1
        freed, self._freed_rows = self._freed_rows, []
        copies = *self.blocks.tier.take_copies(), *self.blocks.snapshots.take_copies()
        return step.finished(self._step, freed, *copies)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.blocks.size)

    # -- results

    def update(self, done: ScheduledStep, output: protocol.StepOutput) -> list[protocol.Delta]:
        """Add a step's sampled tokens, a list for each of done.sampled, and finish sequences that have ended."""
        deltas = []
        logprobs, next_index = output.logprobs, 0
        for i, (sequence, tokens) in enumerate(zip(done.sampled, output.tokens(), strict=True)):
            index, next_index = next_index, next_index + len(tokens)
            if sequence.finished:  # ended or aborted after this step was planned: the tokens are dropped
                continue
            shown, finish, stop = self._append(sequence, tokens)
            given = []
            if logprobs:
                given = [logprobs[j] for j in range(index, index + len(shown)) if j in logprobs]
            deltas.append(
                protocol.Delta(
                    id=sequence.id,
                    tokens=shown,
                    logprobs=given,
                    finish=finish,
                    stop_token=stop,
                    cached_tokens=0 if sequence.reported else sequence.cached_tokens,
                    embedding=output.embeddings.get(i, b""),
                    prompt_logprobs=output.prompt_logprobs.get(i, []),
                    error=sequence.grammar.error if sequence.grammar is not None else "",
                    status=400 if finish == "error" else 0,
                )
            )
            sequence.reported = True
            if finish:
                self._finish(sequence)
        return deltas

    def _append(self, sequence: Sequence, tokens: list[int]) -> tuple[list[int], str, int]:
        """Add tokens up to one that ends the sequence.

        Returns those that are shown, why it has ended ("": it has not) and its stop token (-1: none).
        """
        finish, stop, shown = "", -1, True
        for count, token in enumerate(tokens, 1):
            sequence.tokens.append(token)
            shown = sequence.grammar is None or not sequence.grammar.over
            finish, stop = self._finish_reason(sequence, token)
            if finish:
                tokens = tokens[:count]
                break
        if not sequence.sampling.pooling:
            self.counters.output_tokens += len(tokens)
        if len(tokens) > 1:
            sequence.length += len(tokens) - 1
            self._skip(sequence, len(tokens) - 1)
        if sequence.row >= 0:
            self._cache_blocks(sequence)
        return tokens if shown and stop < 0 else tokens[:-1], finish, stop

    def _skip(self, sequence: Sequence, tokens: int) -> None:
        """Take over that a step has computed this many tokens more than were planned."""
        if sequence.row < 0:  # preempted: all is computed again
            self.backlog += tokens
            return
        sequence.num_computed += tokens
        if self._blocks_for(sequence.num_computed) > len(sequence.blocks):
            room = len(sequence.blocks) * self.blocks.size
            raise RuntimeError(f"{sequence.id}: a step computed {sequence.num_computed} tokens, {room} have a block")

    def _finish_reason(self, sequence: Sequence, token: int) -> tuple[str, int]:
        outputs = len(sequence.tokens) - sequence.prompt_len
        ended = sequence.grammar.over if sequence.grammar is not None else ""
        if not ended and token in sequence.sampling.stop_token_ids and outputs > sequence.sampling.min_tokens:
            return "stop", token
        if sequence.grammar is not None and (ended := ended or sequence.grammar.accept(token)):
            return ended, -1
        if outputs >= sequence.sampling.max_tokens:
            return "length", -1
        return "", -1

    def _finish(self, sequence: Sequence) -> None:
        del self._by_id[sequence.id]
        self.backlog -= sequence.remaining - sequence.expected
        sequence.finished = True
        if sequence.row >= 0:
            self.running.remove(sequence)
            self._free_row(sequence)
        else:
            self.waiting.remove(sequence)

    def _free_row(self, sequence: Sequence) -> None:
        heapq.heappush(self._free_rows, sequence.row)
        self._freed_rows.append(sequence.row)
        sequence.row = -1
        self.blocks.free(sequence.blocks)
        sequence.blocks = []

    # -- checks and statistics

    def check_empty(self) -> None:
        """Raise RuntimeError unless all counts are those of a scheduler without sequences. Takes constant time."""
        self.blocks.check_empty()
        if len(self._free_rows) != self.max_num_seqs:
            raise RuntimeError(f"row accounting is broken: {len(self._free_rows)} of {self.max_num_seqs} rows are free")
        if self.running or self.waiting or self.backlog:
            listed = f"{len(self.running)} run, {len(self.waiting)} wait"
            raise RuntimeError(f"no sequence is left, but {listed}, and {self.backlog} tokens are to be computed")

    def check(self, steps: Iterable[ScheduledStep] = ()) -> None:
        """Raise RuntimeError unless rows, blocks and sampled ids add up. steps: whose results have not arrived yet."""
        for _ in self.audit(steps):
            pass

    def audit(self, steps: Iterable[ScheduledStep] = ()) -> Iterator[None]:
        """`check` in steps, a slice of blocks each. No step may be planned before its end; it may be dropped."""
        awaited = Counter(sequence for step in steps for sequence in step.sampled if not sequence.finished)
        found = {sequence: sequence.in_flight for sequence in self._by_id.values() if sequence.in_flight}
        if found != awaited:
            raise RuntimeError(
                f"{sum(found.values())} sampled ids have not arrived, {awaited.total()} are on their way"
            )
        rows = [s.row for s in self.running]
        if len(set(rows)) != len(rows) or set(rows) & set(self._free_rows):
            raise RuntimeError(f"row accounting is broken: {sorted(rows)}")
        if self.backlog != sum(s.remaining - s.expected for s in self._by_id.values()):
            raise RuntimeError(f"the backlog of {self.backlog} tokens is not what the sequences have to compute")
        yield from self.blocks.audit(s.blocks for s in self.running)

    def stats(self) -> protocol.Stats:
        return protocol.Stats(
            running=len(self.running),
            waiting=len(self.waiting),
            blocks_total=self.blocks.count,
            blocks_used=self.blocks.num_used,
            blocks_cached=self.blocks.num_cached,
            **self.blocks.tier.stats(),
            **self.blocks.snapshots.stats(),
            **asdict(self.counters),
        )


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
