"""The scheduler: decides which sequences compute how many tokens in the next step.

There is no prefill phase and no decode phase. A sequence has `num_computed` tokens and wants to reach `length`. Every
step spends one token budget over all sequences, running ones first. Chunked prefill, prefix-cache hits and preemption
all follow from that one rule.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from .. import protocol
from .blocks import Blocks, Hash, Prefix
from .counters import Counters
from .grammar import Grammar
from .image_store import ImageStore
from .sequence import Sequence
from .speculation import Speculation
from .step import PlannedStep, ScheduledStep

NO_MEMORY = "the GPU had not enough memory to sample this request's tokens: ask again, or with fewer logprobs"


class Scheduler:
    """Schedules one replica. Within a priority, first come is first served; a lower priority number goes first.

    Admission cannot deadlock. The pool holds `max_model_len` tokens, so the first sequence in order can always run to
    its end once later ones are preempted. It is never preempted itself.
    """

    def __init__(
        self,
        blocks: Blocks,
        max_num_seqs: int,
        token_budget: int,
        max_model_len: int,
        stages: int = 1,
        speculation: Speculation | None = None,
        images: ImageStore | None = None,
    ):
        self.blocks = blocks
        self.images = images or ImageStore()
        self.speculation = speculation
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
        self._rejected: list[int] = []  # to announce with it, as protocol.Plan has them
        self._unread = 0  # steps whose results have not arrived ...
        self._speculative = 0  # ... and those of them whose lengths are not known
        self._ended_at = 0.0  # when the last step's results were here; 0: nothing has been waiting since
        self._kept = False  # whether drafts were computed after that
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
        sequence.expected = expected
        bisect.insort(self.waiting, sequence, key=_order)  # first: where anything raises, nothing is changed
        self._by_id[sequence.id] = sequence
        self.backlog += sequence.remaining - expected

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
        step = PlannedStep(self.stages)
        group = self._decode_group()
        if self.speculation is not None and not self._speculate(step, group):
            return None
        budget = self._schedule_running(step, {sequence.id for sequence in group}, self._reserved(step, group))
        self._admit(step, budget)
        if step.chunks and self.speculation is not None:
            step.follows = step.follows or self.speculation.reads_prompts
        if not step.decodes and not step.chunks and not step.verified and not step.tower:
            return None
        return self._make_plan(step)

    def _speculate(self, step: PlannedStep, group: list[Sequence]) -> bool:
        """Give a step that decodes these sequences drafts, where they pay and need no preemption. False: steps in
        flight have to end first, as drafts follow tokens that are known. With several stages only sequences with drafts
        wait, and leave the group."""
        assert self.speculation is not None
        if self._speculative and self.stages == 1:
            return False
        step.query_len, step.proposed = self.speculation.choose(group)
        step.wanted, step.follows = self.speculation.model_drafts, self.speculation.model_follows
        if step.query_len > 1 and not self._fits(group, step.query_len):
            step.query_len = 1
        if step.query_len == 1:
            return True
        if self.stages == 1 and self._unread:
            return False
        group[:] = [sequence for sequence in group if not (sequence.in_flight and sequence.id in step.proposed)]
        return True

    def _fits(self, group: list[Sequence], query_len: int) -> bool:
        """Whether there are blocks for so many tokens of each of these sequences."""
        until = ((one, self._until(one.num_computed + query_len)) for one in group)
        blocks = sum(sum(self.blocks.lacking(one.tables, tokens)) for one, tokens in until if tokens > one.room)
        return blocks <= self.blocks.num_free and query_len * len(group) < self.token_budget

    def _verifies(self, sequence: Sequence, step: PlannedStep) -> bool:
        """Whether a decoding sequence has query_len tokens in this step. With one stage all have, where they fit, as
        steps are replayed in which all have as many."""
        return (
            step.query_len > 1
            and not sequence.in_flight
            and (self.stages == 1 or sequence.id in step.proposed)
            and not sequence.sampling.pooling
            and sequence.num_computed + step.query_len <= self.max_model_len
        )

    def _reserved(self, step: PlannedStep, group: list[Sequence]) -> int:
        """Tokens of the decoding sequences of a step."""
        if step.query_len == 1:
            return len(group)
        return sum(step.query_len if self._verifies(sequence, step) else 1 for sequence in group)

    def _schedule_running(self, step: PlannedStep, group: set[str], reserved: int) -> int:
        """Spend the budget over the running sequences in order. Returns what is left.

        group: the ids of the decoding sequences, for whose tokens so much is reserved: a long prompt cannot stall them.
        """
        # With more sequences than budget all still decode, and a prompt gets one token.
        budget = max(self.token_budget, reserved + 1)
        for sequence in list(self.running):
            if sequence.row < 0 or sequence.ends_by_length:  # preempted in this call; or only its last id is awaited
                continue
            if sequence.awaits_mask:
                continue
            remaining = sequence.remaining
            if remaining == 1:
                if sequence.id not in group:
                    continue
                if self._verifies(sequence, step):
                    reserved -= step.query_len
                    if self._grow(sequence, step.query_len, step):
                        self._add_verified(sequence, step)
                        budget -= step.query_len
                    continue
                reserved -= 1
            most = min(remaining, budget - reserved)
            count = sequence.chunk(sequence.num_computed, most) if most > 0 else 0
            if count > 0 and self._grow(sequence, count, step):
                self._add_chunk(sequence, count, step)
                budget -= min(count, most)  # where an image goes beyond, others decode all the same
        return budget - reserved

    def _decode_group(self) -> list[Sequence]:
        """The decoding sequences of the next step.

        With one pipeline stage these are all. With more, a sequence's next token needs the one that the last stage has
        yet to sample. So the sequences are divided evenly over `stages` steps: while the last stage computes one
        group, the first computes another. Where there is no other work, waiting gains nothing and all may go.
        """
        decoding = [s for s in self.running if s.remaining == 1 and not s.ends_by_length and not s.awaits_mask]
        if self.stages > 1:
            most = -(-len(decoding) // self.stages)
            decoding = [s for s in decoding if not s.awaited]
            due = [s for s in decoding if not s.in_flight or self._step + 1 - s.sampled_at >= self.stages]
            if not due and all(s.remaining <= 1 for s in self.running):
                due = [s for s in decoding if s.in_flight < 2]  # more steps ahead would be wasted when it ends
            decoding = due[:most]
        return decoding

    def _grow(self, sequence: Sequence, count: int, step: PlannedStep) -> bool:
        """Allocate the blocks for `count` more tokens and preempt later sequences if needed.

        Returns False if the sequence itself was preempted. Sequences are served in order, so a preempted one is never
        part of the step yet.
        """
        until = self._until(sequence.num_computed + count)
        if until <= sequence.room:
            return True
        if self.blocks.windows:
            self.blocks.release(sequence.tables, sequence.num_computed)
        needed = self.blocks.lacking(sequence.tables, until)
        while sum(needed) > self.blocks.num_free:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        number = sequence.row
        for table, count in zip(sequence.tables, needed, strict=True):
            blocks = self.blocks.allocate(count)
            table += blocks
            step.block_ids += blocks
            step.block_rows += [number] * count
            number += self.max_num_seqs
        sequence.room = self.blocks.room(sequence.tables)
        return True

    def _until(self, tokens: int) -> int:
        """How many tokens of a sequence need a block, where so many are computed."""
        lookahead = 0 if self.speculation is None else self.speculation.lookahead
        return min(tokens + lookahead, self.max_model_len) if lookahead else tokens

    def _preempt(self, sequence: Sequence) -> None:
        """Free its row and blocks and queue it again. Later it recomputes what the prefix cache no longer has."""
        self.running.remove(sequence)
        self._free_row(sequence)
        if self.speculation is not None:
            self.speculation.preempted(sequence)
        self.backlog += sequence.num_computed
        sequence.num_computed = 0
        bisect.insort(self.waiting, sequence, key=_order)
        self.counters.preemptions += 1

    def _admit(self, step: PlannedStep, budget: int) -> None:
        """Admit waiting sequences in order, until one does not fit. Those whose masks are late are passed over, and
        those with images that the tower has not seen: it works on these for what is left of the budget."""
        unseen = list[Sequence]()
        while budget > 0 and self.waiting and self._free_rows:
            able = (one for one in self.waiting if (one.in_flight or not one.awaits_mask) and one not in unseen)
            sequence = next(able, None)
            if sequence is None:
                break
            if sequence.in_flight:  # preempted while an id was on its way; that id is needed to compute it again
                break
            hits, count = self._find_prefix(sequence, step, budget)
            computed = hits.matched * self.blocks.size
            if lacking := self.images.lacking(sequence, computed):
                later, users = self._lacking_later(sequence, step, budget), itertools.chain(self.running, self.waiting)
                budget -= self.images.work(sequence, lacking, later, users, budget, step)
                if self.images.lacking(sequence, computed):
                    unseen.append(sequence)
                continue
            needed, in_host = self.blocks.lacking(hits.tables, self._until(computed + count)), hits.in_host > 0
            spare = len(self.running) * len(self.blocks.groups)  # else the new one would soon be preempted
            full = sum(needed) + spare > self.blocks.num_free - self.blocks.num_unreferenced(hits.blocks())
            if full or (in_host and self.blocks.tier.busy):
                break
            self.waiting.remove(sequence)
            self.counters.swapped_in += in_host and sequence.cached_tokens >= 0
            sequence.tables = self.blocks.hold(hits, sequence.hashes)
            for table, more in zip(sequence.tables, needed, strict=True):
                table += self.blocks.allocate(more)
            sequence.room = self.blocks.room(sequence.tables)
            sequence.row = heapq.heappop(self._free_rows)
            sequence.num_computed = computed
            if hits.matched:
                self.blocks.snapshots.load(sequence.hashes[hits.matched - 1], sequence.row)
            self.backlog += sequence.expected - computed
            sequence.expected = 0
            sequence.num_cached_blocks = hits.matched
            if sequence.cached_tokens < 0:
                sequence.cached_tokens, sequence.admitted = computed, time.monotonic()
                self.counters.prompt_tokens += sequence.prompt_len
                self.counters.cached_tokens += computed
                self.counters.images += len(sequence.pictures)
                self.counters.image_hits += max(0, len(sequence.pictures) - sequence.towered)
            step.new.append(sequence.introduced())
            bisect.insort(self.running, sequence, key=_order)
            self._add_chunk(sequence, count, step)
            budget -= count

    def _lacking_later(
        self, sequence: Sequence, step: PlannedStep, budget: int
    ) -> Iterator[tuple[Sequence, protocol.Picture]]:
        """Images that the next sequences behind this one lack, as many sequences as ranks."""
        behind = (one for one in self.waiting[self.waiting.index(sequence) + 1 :] if one.pictures)
        for one in itertools.islice(behind, self.images.ranks):
            hits, _ = self._find_prefix(one, step, budget)
            for picture in self.images.lacking(one, hits.matched * self.blocks.size):
                yield one, picture

    def _find_prefix(self, sequence: Sequence, step: PlannedStep, budget: int) -> tuple[Prefix, int]:
        """The cached prefix that a waiting sequence begins with, and how many tokens it then computes."""
        if self.blocks.prefix_cache:
            sequence.extend_hashes(self.blocks.size)
        usable = sequence.hashes[: sequence.usable_blocks(self.blocks.size)]
        hits = self.blocks.match(usable)
        # where it leaves state snapshots
        ends = hits.matched, (sequence.prompt_len - 1) // self.blocks.size, len(usable)
        while True:
            while (border := self.blocks.snapshots.trim(hits.matched, usable)) < hits.matched:
                hits = self.blocks.match(usable[:border])
            borders = self.blocks.snapshots.borders(hits.matched, *ends)
            sequence.borders = [border * self.blocks.size for border in borders]
            computed = hits.matched * self.blocks.size
            count = sequence.chunk(computed, min(sequence.length - computed, budget))
            # One kernel writes and reads the cache where all rows have one token: none may read what another writes.
            single = count == 1 and not step.chunks if step.query_len == 1 else count == step.query_len
            if not single or step.cached.isdisjoint(hits.blocks()):
                return hits, count
            hits = self.blocks.match(usable[: hits.matched - 1])

    def _add_verified(self, sequence: Sequence, step: PlannedStep) -> None:
        """Have the step sample query_len tokens of a sequence. Of these one counts until its result is here."""
        sequence.num_computed += 1
        sequence.length += 1
        sequence.sampled_at = self._step + 1
        sequence.awaited = True
        step.verified.append(sequence)
        if entered := self._cache_blocks(sequence):
            step.cached.update(entered)

    def _add_chunk(self, sequence: Sequence, count: int, step: PlannedStep) -> None:
        sequence.num_computed += count
        samples = sequence.num_computed == sequence.length
        self.backlog += samples - count
        if samples:
            sequence.length += 1
            sequence.sampled_at = self._step + 1
            sequence.awaited = step.wanted > 0
        self.counters.chunks += not samples
        if count == 1:
            step.decodes.append(sequence)
        else:
            step.chunks.append((sequence, count))
        if entered := self._cache_blocks(sequence):  # true once per block
            step.cached.update(entered)
        if sequence.num_computed in sequence.borders:
            self.blocks.snapshots.save(sequence.row, sequence.hashes[sequence.num_computed // self.blocks.size - 1])

    def _cache_blocks(self, sequence: Sequence) -> Iterable[int]:
        """Enter full blocks of known tokens into the prefix cache. Returns those that are new there.

        That happens when the step that fills a block is planned. It is safe: plans are executed in order, and a step
        writes keys and values before any sequence reads them. `_admit` handles the exception, steps in which all rows
        have one token. Only blocks with a hash are entered, as a generated token's id must be known.
        """
        if not self.blocks.prefix_cache:
            return ()
        full = min(sequence.num_computed, len(sequence.tokens)) // self.blocks.size
        if full <= sequence.num_cached_blocks:
            return ()
        sequence.extend_hashes(self.blocks.size)
        first, sequence.num_cached_blocks = sequence.num_cached_blocks, full
        return self.blocks.cache_full(sequence.tables, sequence.hashes, first, full)

    def _make_plan(self, step: PlannedStep) -> ScheduledStep:
        self._step += 1
        self.counters.steps += 1
        freed, self._freed_rows = self._freed_rows, []
        rejected, self._rejected = protocol.pack_u16(self._rejected), []
        copies = *self.blocks.tier.take_copies(), *self.blocks.snapshots.take_copies()
        planned = step.finished(self._step, freed, rejected, *copies)
        self._unread += 1
        self._speculative += planned.speculative
        return planned

    # -- results

    def update(self, done: ScheduledStep, output: protocol.StepOutput) -> list[protocol.Delta]:
        """Add a step's sampled tokens, a list for each of done.sampled, and finish sequences that have ended."""
        deltas, added, drafted, accepted = list[protocol.Delta](), 0, 0, 0
        logprobs, next_index, verified = output.logprobs, 0, len(done.drafts)
        wanted, drafts = done.plan.wanted, protocol.unpack_u32(output.drafts).tolist()
        if done.plan.keeps:
            drafts = [protocol.MADE] * (wanted * len(done.sampled))
        self._unread -= 1
        self._speculative -= done.speculative
        for i, (sequence, tokens) in enumerate(zip(done.sampled, output.tokens(), strict=True)):
            index, next_index = next_index, next_index + len(tokens)
            if i == verified:
                drafted = accepted = 0
            # Ended or aborted after this step was planned, or without a mask: the tokens are dropped.
            if sequence.finished or sequence in done.dropped:
                continue
            if i in output.failed:
                deltas.append(protocol.Delta(sequence.id, finish="error", error=NO_MEMORY, status=503))
                self._finish(sequence)
                continue
            sequence.awaited = False
            if i < verified:
                assert self.speculation is not None
                drafted, accepted = len(done.drafts[i]), len(tokens) - 1
                self.speculation.verified(sequence, drafted, accepted)
                if sequence.row >= 0 and len(tokens) < done.query_len:
                    self._rejected += sequence.row, done.query_len - len(tokens)
            shown, finish, stop = self._append(sequence, tokens)
            added += len(tokens)
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
                    admitted=0.0 if sequence.reported else sequence.admitted,
                    drafted=drafted,
                    accepted=min(accepted, len(shown)),  # the sequence may end within them
                    embedding=output.embeddings.get(i, b""),
                    prompt_logprobs=output.prompt_logprobs.get(i, []),
                    error=sequence.grammar.error if sequence.grammar is not None else "",
                    status=400 if finish == "error" else 0,
                )
            )
            sequence.reported = True
            if finish:
                self._finish(sequence)
            elif drafts:
                assert self.speculation is not None
                self.speculation.made(sequence, drafts[i * wanted : (i + 1) * wanted])
        if self.speculation is not None:
            now = time.monotonic()
            # Drafts that ranks keep count for the step behind theirs: that is as much where both have them, or none.
            if self._ended_at and done.timed and done.plan.keeps == self._kept:
                self.speculation.took(len(done.sampled), done.query_len, added, now - self._ended_at)
            self._ended_at, self._kept = 0.0 if self.idle else now, done.plan.keeps
        return deltas

    def _append(self, sequence: Sequence, tokens: list[int]) -> tuple[list[int], str, int]:
        """Add tokens up to one that ends the sequence.

        Returns those that are shown, why it has ended ("": it has not) and its stop token (-1: none).
        """
        finish, stop, shown = "", -1, True
        for count, token in enumerate(tokens, 1):
            sequence.tokens.append(token)
            shown = not sequence.over_before()
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
        if sequence.num_computed > sequence.room:
            raise RuntimeError(
                f"{sequence.id}: a step computed {sequence.num_computed} tokens, {sequence.room} have a block"
            )

    def _finish_reason(self, sequence: Sequence, token: int) -> tuple[str, int]:
        outputs = len(sequence.tokens) - sequence.prompt_len
        if not sequence.over_before() and sequence.ends_with(token, outputs):
            return "stop", token
        if sequence.grammar is not None and sequence.grammar.over and outputs >= sequence.grammar.ended_at:
            return sequence.grammar.over, -1
        if outputs >= sequence.sampling.max_tokens:
            return "length", -1
        return "", -1

    def end(self, grammar: Grammar) -> list[protocol.Delta]:
        """End the sequence of a grammar that was over later than its step; its delta, where it has not ended yet."""
        sequence = self._by_id.get(grammar.request.id)
        if sequence is None or sequence.grammar is not grammar:
            return []
        self._finish(sequence)
        return [protocol.Delta(sequence.id, finish=grammar.over, error=grammar.error, status=grammar.status)]

    def withdraw(self, sequence: Sequence, steps: Iterable[ScheduledStep]) -> None:
        """Take a sequence out of these steps, in flight, which do not get its mask in time: it is computed again."""
        for step in steps:
            if sequence in step.sampled:
                step.dropped.append(sequence)
        self.backlog -= sequence.in_flight
        sequence.length -= sequence.in_flight
        sequence.awaited = False
        if sequence.row >= 0:
            self._preempt(sequence)

    def _finish(self, sequence: Sequence) -> None:
        del self._by_id[sequence.id]
        if self.speculation is not None:
            self.speculation.ended(sequence)
        self.backlog -= sequence.remaining - sequence.expected
        sequence.finished = True
        if sequence.grammar is not None:
            sequence.grammar.drop()
        if sequence.row >= 0:
            self.running.remove(sequence)
            self._free_row(sequence)
        else:
            self.waiting.remove(sequence)

    def _free_row(self, sequence: Sequence) -> None:
        heapq.heappush(self._free_rows, sequence.row)
        self._freed_rows.append(sequence.row)
        sequence.row = -1
        self.blocks.free_all(sequence.tables)
        sequence.tables, sequence.room = [], 0

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
        awaited = Counter(one for step in steps for one in step.sampled if not (one.finished or one in step.dropped))
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
        yield from self.blocks.audit(table for s in self.running for table in s.tables)

    def stats(self) -> protocol.Stats:
        counted: dict[str, Any] = self.blocks.tier.stats() | self.blocks.snapshots.stats() | asdict(self.counters)
        if self.speculation is not None:
            counted |= self.speculation.stats()
        return protocol.Stats(
            running=len(self.running),
            waiting=len(self.waiting),
            blocks_total=self.blocks.count,
            blocks_used=self.blocks.num_used,
            blocks_cached=self.blocks.num_cached,
            **counted,
        )


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
