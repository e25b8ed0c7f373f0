"""Ranks without a model: the KV cache holds token ids, and the next token is a hash of all that the cache shows.

A wrong block, a prefix that was not computed, or a row mixed up with another changes the tokens.
"""

from __future__ import annotations

import hashlib
import random

import numpy as np
from phalanx.rank import cache_groups, protocol
from phalanx.rank.cache_groups import ONE_GROUP
from phalanx.rank.scheduler.blocks import Blocks
from phalanx.rank.scheduler.replica import Replica
from phalanx.rank.scheduler.scheduler import Scheduler
from phalanx.rank.scheduler.snapshots import Snapshots
from phalanx.rank.worker.state import BatchState

VOCAB = 50


def next_token(tokens) -> int:
    return hashlib.blake2b(np.asarray(tokens, np.int64).tobytes(), digest_size=4).digest()[0] % VOCAB


def alone(prompt, count, stop=(), window=0) -> list[int]:
    """Tokens that a sequence must produce whatever else runs. window: tokens that it sees; 0: all."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens[-window:]))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


class Done:
    def __init__(self, tokens):
        self.tokens = tokens  # of each row

    def wait(self, seconds):
        return True

    def output(self):
        return step_output(self.tokens)


def step_output(tokens, logprobs=None, drafts=()) -> protocol.StepOutput:
    """A step output of these tokens of each row, and drafts of all."""
    ids, counts = protocol.pack_u32([token for row in tokens for token in row]), bytes(map(len, tokens))
    given = b"" if set(counts) <= {1} else counts
    return protocol.StepOutput(ids, logprobs or {}, counts=given, drafts=protocol.pack_u32(drafts))


class ToyRanks:
    """Executes each plan when it is started, as the real ranks do in order; results are read one step late.

    most: tokens that a row samples in one step, as far as its blocks go. More than one: each result has to be read
    before the next plan, as these ranks tell nobody else how far they are.
    """

    def __init__(
        self,
        blocks: int,
        block_size: int,
        max_num_seqs: int = 8,
        max_model_len: int = 200,
        most: int = 1,
        host: int = 0,
        snapshots: int = 0,
        groups=ONE_GROUP,
    ):
        """host: blocks in host memory. snapshots: of states; each row's is the tokens that it has computed. groups: of
        layers, which share the memory of blocks."""
        self.most = most
        self.groups = groups
        width = block_size * max(group.entries for group in groups)
        self.host = np.full((host, width), -1, np.int64)
        self.rows = BatchState(max_num_seqs, max_model_len, block_size, groups, (), blocks)
        self.cache = np.full((blocks, width), -1, np.int64)
        self.last = np.zeros(max_num_seqs, np.int64)
        self.size = block_size
        self.states: list[list[int]] = [[] for _ in range(max_num_seqs + snapshots)]
        self.plans: list[protocol.Plan] = []

    def show(self, image: protocol.Pixels) -> None:
        """Ranks without a model look at no image."""

    def start(self, plan: protocol.Plan) -> Done:
        plan = protocol.decode_plan(protocol.encode_plan(plan))
        self.plans.append(plan)
        if plan.stop >= 0:
            return Done([])
        self._swap(plan)
        self._copy_states(plan.state_loads, len(self.last), 0)
        work = self.rows.apply(plan)
        everything = zip(work.rows, work.starts, work.counts, strict=True)
        for row, start, count in everything:  # keys and values of all rows are written before any is read
            self.states[row] = self.states[row] if start else []  # a row is not cleared
            for position in range(start, start + count):
                known = position < self.rows.known[row]
                token = self.rows.tokens[row][position] if known else self.last[row]
                for group in range(len(self.groups)):
                    self.cache[self._cell(row, position, group)] = token
                self.states[row].append(token)
        sampled = []
        for row, start, count, samples in zip(work.rows, work.starts, work.counts, work.samples, strict=True):
            for group in range(len(self.groups)):  # the first token that is computed, which looks back furthest
                self._seen(row, start + 1, group)
            if samples:
                sampled.append(self._sample(row, start + count))
        self._copy_states(plan.state_saves, 0, len(self.last))
        return Done(sampled)

    def _swap(self, plan: protocol.Plan) -> None:
        for copies, source, target in ((plan.swap_out, self.cache, self.host), (plan.swap_in, self.host, self.cache)):
            slots = protocol.unpack_u32(copies)
            for origin, slot in zip(slots[::2], slots[1::2], strict=True):
                target[slot] = source[origin]

    def _copy_states(self, copies: bytes, source: int, target: int) -> None:
        slots = protocol.unpack_u32(copies).tolist()
        for origin, slot in zip(slots[::2], slots[1::2], strict=True):
            self.states[slot + target] = list(self.states[origin + source])

    def _sample(self, row: int, length: int) -> list[int]:
        seen = self._seen(row, length, 0)
        for group in range(1, len(self.groups)):
            window = self._seen(row, length, group)
            assert window == seen[-len(window) :]  # groups have kept different tokens
        if len(self.states) > len(self.last):
            assert self.states[row] == seen  # a row's state is not that of its tokens
        tokens = [next_token(seen)]
        room = self.rows.num_blocks[row] * self.size
        while len(tokens) < self.most and len(seen) < room:
            self.cache[self._cell(row, len(seen))] = tokens[-1]
            seen.append(tokens[-1])
            tokens.append(next_token(seen))
        self.last[row] = tokens[-1]
        self.rows.length[row] += len(tokens) - 1
        self.rows.computed[row] += len(tokens) - 1
        return tokens

    def _seen(self, row: int, length: int, group: int) -> list[int]:
        """The tokens that a group's layers may read, of which a window's first ones are hidden from the next token."""
        window = self.groups[group].window
        first = max(0, length - window - cache_groups.TILE + 1) if window else 0
        if self.groups[group].chunked:
            first = (length - 1) // window * window
        seen = [self.cache[self._cell(row, p, group)] for p in range(first, length)]
        assert -1 not in seen
        known = self.rows.tokens[row][first:length].tolist()
        assert seen[: len(known)] == known, "blocks have other tokens"
        return seen[-window:] if window and not group else seen

    def _cell(self, row: int, position: int, group: int = 0) -> tuple[int, int]:
        """The place of a position in blocks. Entries of one block are as far apart as there are blocks."""
        (table,) = self.rows.rows_of(np.array([row]), group)
        entry, block = divmod(self.rows.table[table, position // self.size], len(self.cache))
        return block, entry * self.size + position % self.size

    def progress(self) -> bool:
        return False

    def counters(self):
        return {}


def request(name: str, prompt, max_tokens: int = 10, priority: int = 0, salt: str = "", **sampling) -> protocol.Request:
    return protocol.Request(
        name,
        protocol.pack_u32(prompt),
        protocol.SamplingParams(max_tokens=max_tokens, **sampling),
        priority,
        cache_salt=salt,
    )


class Engine:
    """A scheduler and toy ranks, stepped by hand as the loop does."""

    def __init__(
        self,
        blocks=32,
        block_size=4,
        max_num_seqs=8,
        budget=16,
        prefix_cache=True,
        max_model_len=100,
        stages=1,
        most=1,
        tier=None,
        snapshots=0,
        groups=ONE_GROUP,
    ):
        pool = Blocks(blocks, block_size, prefix_cache, tier, Snapshots(snapshots), groups)
        self.scheduler = Scheduler(pool, max_num_seqs, budget, max_model_len, stages)
        of = pool.tier.count, snapshots, groups
        self.ranks = ToyRanks(blocks, block_size, max_num_seqs, max_model_len, most, *of)
        self.replica = Replica(self.scheduler, self.ranks)
        if most > 1:
            self.replica.depth = 1
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, str] = {}
        self.cached: dict[str, int] = {}

    def step(self) -> bool:
        """One turn of the loop; False when nothing was left to do."""
        more = self.replica.plan()
        self.check()
        if not more and self.replica.busy:
            for delta in self.replica.finish():
                self.tokens.setdefault(delta.id, []).extend(delta.tokens)
                self.cached.setdefault(delta.id, delta.cached_tokens)
                if delta.finish:
                    assert delta.id not in self.finish
                    self.finish[delta.id] = delta.finish
            self.check()
        return not self.replica.idle

    def check(self) -> None:
        self.scheduler.check([planned for planned, _ in self.replica._in_flight])

    def run(self, most: int = 10_000) -> None:
        for _ in range(most):
            if not self.step():
                return
        raise AssertionError("the sequences do not come to an end")


def check_random_requests(engine: Engine, draw: random.Random, different: int, longest: int) -> None:
    """Requests that share beginnings, up to so many different tokens, and aborts: tokens are those of sequences alone,
    and no slot is lost."""
    wanted, aborted = {}, set()
    for i in range(30):
        prompt = [draw.randrange(3), *range(draw.randrange(different)), draw.randrange(2)]
        wanted[str(i)] = prompt, draw.randint(1, longest - len(prompt))
        engine.scheduler.add(request(str(i), *wanted[str(i)]))
        for _ in range(draw.randrange(8)):
            engine.step()
        if draw.random() < 0.15:
            name = str(draw.randrange(i + 1))
            engine.scheduler.abort([name])
            aborted.add(name)
    engine.run()
    for name, (prompt, count) in wanted.items():
        whole = alone(prompt, count, window=engine.ranks.groups[0].window)
        got = engine.tokens.get(name, [])
        assert got == whole or (name in aborted and got == whole[: len(got)])
    engine.scheduler.check_empty()
    for slots in (engine.scheduler.blocks.tier.slots, engine.scheduler.blocks.snapshots.slots):
        assert sorted([*slots.free, *slots.values()]) == list(range(slots.count))
