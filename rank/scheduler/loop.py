"""The step loop of rank 0: requests in, plans out, results back, one step ahead of the device."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator

import msgspec

from ... import errors
from .. import protocol
from .replica import GLANCE, Replica
from .router import Router
from .server_link import ServerLink

STATS_EVERY = 0.5  # seconds
AUDIT_AFTER = 1.0  # seconds without a sequence
OVER = object()


class StepLoop:
    def __init__(self, replicas: list[Replica], link: ServerLink):
        self.replicas = replicas
        self.router = Router(replicas)
        self.link = link
        self._draining = False
        self._code = errors.OK
        self._stats_due = 0.0
        self._was_idle = True
        self._audit: Iterator[None] = iter(())
        self._patience: float | None = None  # seconds until the audit goes on; None: it has come to its end

    def run(self) -> int:
        """Serve until drained; the exit code. Raises exits.Stop when the front goes away."""
        while True:
            self._take_requests()
            blocked = [replica for replica in self.replicas if not replica.plan() and replica.busy]
            if blocked:
                self._finish(blocked)
            elif self._draining and self._idle:
                for replica in self.replicas:
                    replica.ranks.start(protocol.Plan(step=-1, stop=self._code))
                return self._code

    @property
    def _idle(self) -> bool:
        return all(replica.idle for replica in self.replicas)

    def _take_requests(self) -> None:
        idle = self._idle and not self._draining
        if idle and not self._was_idle:
            self._rest()
        self._was_idle = idle
        messages = self.link.receive(self._patience if idle else 0.0)
        if idle and not messages:
            self._patience = None if next(self._audit, OVER) is OVER else 0.0
        for message in messages:
            if isinstance(message, protocol.Request):
                self._add(message)
            elif isinstance(message, protocol.Abort):
                for replica in self.replicas:
                    replica.scheduler.abort(message.ids)
            else:
                self._draining, self._code = True, message.code
        if self.link.signalled:
            self.link.signalled = False
            self.link.send(protocol.Draining())  # its front knows what to finish, and says when to end

    def _add(self, request: protocol.Request) -> None:
        try:
            self.router.add(request)
        except ValueError as error:  # the front checks lengths; this keeps a faulty one from stopping the job
            self.link.send(protocol.Deltas([protocol.Delta(request.id, finish="error", error=str(error), status=400)]))

    def _rest(self) -> None:
        """The last sequence has ended: everything must add up now.

        A request may come at once, and should not wait. So only counts are looked at; all blocks are after a pause,
        a slice at a time, for as long as nobody asks anything.
        """
        for replica in self.replicas:
            replica.scheduler.check_empty()
        self.link.send(protocol.Deltas([], self._stats()))
        self._audit = itertools.chain.from_iterable(replica.scheduler.audit() for replica in self.replicas)
        self._patience = AUDIT_AFTER

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
            self.link.send(protocol.Deltas(deltas, stats))

    def _stats(self) -> protocol.Stats:
        total: Counter[str] = Counter()
        for replica in self.replicas:
            total.update(msgspec.structs.asdict(replica.scheduler.stats()))
        return protocol.Stats(**total)
