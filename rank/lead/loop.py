"""The step loop of rank 0: requests in, plans out, results back, one step ahead of the device."""

from __future__ import annotations

import time
from collections import Counter

import msgspec

from .. import exits, step
from .link import FrontLink
from .replica import GLANCE, Replica
from .router import Router

STATS_EVERY = 0.5  # seconds


class Lead:
    def __init__(self, replicas: list[Replica], link: FrontLink):
        self.replicas = replicas
        self.router = Router(replicas)
        self.link = link
        self._draining = False
        self._code = exits.OK
        self._stats_due = 0.0
        self._was_idle = True

    def run(self) -> int:
        """Serve until drained; the exit code. Raises exits.Stop when the front goes away."""
        while True:
            self._take_requests()
            blocked = [replica for replica in self.replicas if not replica.plan() and replica.busy]
            if blocked:
                self._finish(blocked)
            elif self._draining and self._idle:
                for replica in self.replicas:
                    replica.ranks.start(step.Plan(step=-1, stop=self._code))
                return self._code

    @property
    def _idle(self) -> bool:
        return all(replica.idle for replica in self.replicas)

    def _take_requests(self) -> None:
        idle = self._idle
        if idle and not self._draining and not self._was_idle:
            self._rest()
        self._was_idle = idle
        wait = None if idle and not self._draining else 0.0
        for message in self.link.receive(wait):
            if isinstance(message, step.Request):
                self._add(message)
            elif isinstance(message, step.Abort):
                for replica in self.replicas:
                    replica.scheduler.abort(message.ids)
            else:
                self._draining, self._code = True, message.code
        if self.link.signalled:
            self.link.signalled = False
            self.link.send(step.Draining())  # its front knows what to finish, and says when to end

    def _add(self, request: step.Request) -> None:
        try:
            self.router.add(request)
        except ValueError as error:  # the front checks lengths; this keeps a faulty one from stopping the job
            self.link.send(step.Deltas([step.Delta(request.id, finish="error", error=str(error), status=400)]))

    def _rest(self) -> None:
        """The last sequence has ended: everything must add up now."""
        for replica in self.replicas:
            replica.scheduler.check()
        self.link.send(step.Deltas([], self._stats()))

    def _finish(self, blocked: list[Replica]) -> None:
        """Tell the front what one step of each replica that can go no further has brought, once it is there."""
        if len(self.replicas) == 1:
            blocked[0].wait_pushing()
        elif not any([replica.wait(0) for replica in blocked]):
            for replica in self.replicas:
                replica.ranks.progress()
            blocked[0].wait(GLANCE)
        deltas = [delta for replica in blocked if replica.wait(0) for delta in replica.finish()]
        now = time.monotonic()
        stats = None
        if now >= self._stats_due:
            self._stats_due = now + STATS_EVERY
            stats = self._stats()
        if deltas or stats:
            self.link.send(step.Deltas(deltas, stats))

    def _stats(self) -> step.Stats:
        total: Counter[str] = Counter()
        for replica in self.replicas:
            total.update(msgspec.structs.asdict(replica.scheduler.stats()))
        return step.Stats(**total)
