"""Ranks without a model that draw each token evenly from those that the step's masks allow."""

import random
import time
from collections import deque

import numpy as np
from phalanx.rank import protocol
from phalanx.rank.scheduler.blocks import Blocks
from phalanx.rank.scheduler.replica import Replica
from phalanx.rank.scheduler.scheduler import Scheduler
from phalanx.rank.worker.state import BatchState

from .toy import step_output


class Pending:
    """A step that has no result before its masks have come."""

    def __init__(self, step, rows):
        self.step, self.rows, self.tokens = step, rows, None

    def wait(self, seconds):
        assert self.tokens is not None  # the loop waits for a step whose masks it has not sent
        return True

    def output(self):
        return step_output([[token] for token in self.tokens])


class UniformRanks:
    """eager: tokens that are drawn three times in ten where they are allowed, so that texts come to an end."""

    def __init__(self, max_num_seqs, max_model_len, block_size, vocab_size, seed, eager=()):
        self.state = BatchState(max_num_seqs, max_model_len, block_size)
        self.constrained = np.zeros(max_num_seqs, bool)
        self.random = random.Random(seed)
        self.vocab_size = vocab_size
        self.eager = np.zeros(vocab_size, bool)
        self.eager[list(eager)] = True
        self.steps = deque()
        self.sent = deque()
        self.masked = 0

    def start(self, plan):
        plan = protocol.decode_plan(protocol.encode_plan(plan))
        for new in plan.new:
            self.constrained[new.row] = new.constrained
        one = Pending(plan.step, self.state.apply(plan).sampled_rows)
        self.steps.append(one)
        self._run()
        return one

    def mask(self, masks):
        self.masked += 1
        self.sent.append(protocol.decode_plan(protocol.encode_plan(masks)))
        self._run()

    def progress(self):
        return False

    def counters(self):
        return {}

    def _run(self):
        while self.steps:
            one = self.steps[0]
            waiting = int(self.constrained[one.rows].sum())
            if waiting and not self.sent:
                return
            allowed = iter(())
            if waiting:
                masks = self.sent.popleft()
                assert masks.step == one.step
                bits = np.frombuffer(masks.bits, np.uint8).reshape(waiting, -1)
                allowed = iter(np.unpackbits(bits, axis=1, bitorder="little")[:, : self.vocab_size].astype(bool))
            one.tokens = [self._draw(next(allowed) if self.constrained[row] else None) for row in one.rows]
            self.steps.popleft()

    def _draw(self, allowed):
        if allowed is None:
            return self.random.randrange(self.vocab_size)
        if self.random.random() < 0.3 and (allowed & self.eager).any():
            allowed = allowed & self.eager
        tokens = np.flatnonzero(allowed)
        assert len(tokens), "nothing is allowed"
        return int(tokens[self.random.randrange(len(tokens))])


def compile_all(grammars, requests):
    """Grammars by the requests' ids; why there is none is a text."""
    for request in requests:
        grammars.compile(request)
    found = {}
    until = time.monotonic() + 60
    while any(one.id not in found for one in requests) and time.monotonic() < until:
        made, _ = grammars.take()
        found |= {one.id: str(grammar) if isinstance(grammar, Exception) else grammar for one, grammar in made}
        time.sleep(0.001)  # 1 ms: what the step loop waits is of that order
    return found


class Uniform:
    """A scheduler and such ranks, stepped by hand as the loop does. grammars: where requests have any."""

    def __init__(self, vocab_size, seed=0, blocks=256, max_num_seqs=16, stages=1, eager=(), grammars=None):
        self.scheduler = Scheduler(Blocks(blocks, 16), max_num_seqs, 64, 1024, stages)
        self.ranks = UniformRanks(max_num_seqs, 1024, 16, vocab_size, seed, eager)
        self.replica = Replica(self.scheduler, self.ranks)
        self.grammars = grammars
        self.tokens, self.ends = {}, {}

    def add(self, name, prompt, grammar=None, max_tokens=100, **sampling):
        """grammar: its text."""
        params = protocol.SamplingParams(max_tokens=max_tokens, **sampling)
        request = protocol.Request(name, protocol.pack_u32(prompt), params, grammar=grammar or "")
        made = compile_all(self.grammars, [request])[name] if grammar else None
        assert not isinstance(made, str), made
        self.scheduler.add(request, grammar=made)

    def step(self):
        while self.replica.plan():
            pass
        if self.replica.busy:
            self.take(self.replica.finish())
        if self.grammars is not None:
            for one in self.grammars.take()[1]:
                self.take(self.scheduler.end(one))

    def take(self, deltas):
        for delta in deltas:
            self.tokens.setdefault(delta.id, []).extend(delta.tokens)
            if delta.finish:
                self.ends[delta.id] = delta

    def run(self):
        while not self.replica.idle:
            self.step()
        self.scheduler.check_empty()
