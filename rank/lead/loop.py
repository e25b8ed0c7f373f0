"""The step loop of rank 0: requests in, plans out, results back, one step ahead of the device."""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol

from .. import exits, step
from .link import FrontLink
from .scheduler import Scheduler, Step

DEPTH = 2  # steps under way: one runs while the next is planned and sent
STATS_EVERY = 0.5  # seconds


class Result(Protocol):
    """A step's outcome, still to come."""

    def wait(self, seconds: float | None) -> bool:
        """True once it is there."""

    def tokens(self) -> tuple[list[int], dict[int, step.TokenLogprob]]:
        """The sampled ids in the plan's order and, by index, the log-probabilities of those that want them."""


class Ranks(Protocol):
    """All ranks as the loop sees them; rank/work/team.py has the real one."""

    def start(self, plan: step.Plan) -> Result:
        """Send the plan to every rank and begin it here."""

    def progress(self) -> bool:
        """Move outstanding sends on; False when none is left."""


class Lead:
    def __init__(self, scheduler: Scheduler, ranks: Ranks, link: FrontLink):
        self.scheduler = scheduler
        self.ranks = ranks
        self.link = link
        self._under_way: deque[tuple[Step, Result]] = deque()
        self._draining = False
        self._code = exits.OK
        self._stats_due = 0.0
        self._was_idle = True

    def run(self) -> int:
        """Serve until drained; the exit code. Raises exits.Stop when the front goes away."""
        while True:
            self._take_requests()
            planned = self.scheduler.schedule()
            if planned is not None:
                self._under_way.append((planned, self.ranks.start(planned.plan)))
            if self._under_way and (planned is None or len(self._under_way) == DEPTH):
                self._finish_oldest()
            elif self.scheduler.idle and self._draining:
                self.ranks.start(step.Plan(step=-1, stop=self._code))
                return self._code

    def _take_requests(self) -> None:
        busy = bool(self._under_way) or not self.scheduler.idle
        if not busy and not self._draining and not self._was_idle:
            self._rest()
        self._was_idle = not busy
        wait = 0.0 if busy or self._draining else None
        for message in self.link.receive(wait):
            if isinstance(message, step.Request):
                self._add(message)
            elif isinstance(message, step.Abort):
                self.scheduler.abort(message.ids)
            else:
                self._draining, self._code = True, message.code
        if self.link.signalled:
            self.link.signalled = False
            self.link.send(step.Draining())  # its front knows what to finish, and says when to end

    def _add(self, request: step.Request) -> None:
        try:
            self.scheduler.add(request)
        except ValueError as error:  # the front checks lengths; this keeps a faulty one from stopping the job
            self.link.send(step.Deltas([step.Delta(request.id, finish="error", error=str(error), status=400)]))

    def _rest(self) -> None:
        """The last sequence has ended: everything must add up now."""
        self.scheduler.check()
        self.link.send(step.Deltas([], self.scheduler.stats()))

    def _finish_oldest(self) -> None:
        done, result = self._under_way.popleft()
        wait = 2e-4
        while self.ranks.progress() and not result.wait(wait):  # a plan may need a push to reach the far ranks
            wait = min(wait * 2, 0.01)
        result.wait(None)
        tokens, logprobs = result.tokens()
        deltas = self.scheduler.update(done, tokens, logprobs)
        now = time.monotonic()
        stats = None
        if now >= self._stats_due:
            self._stats_due = now + STATS_EVERY
            stats = self.scheduler.stats()
        if deltas or stats:
            self.link.send(step.Deltas(deltas, stats))
