"""Rank 0's step loop: it receives requests, sends plans and reads results, one step ahead of the device."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator

import msgspec

from ... import errors
from .. import protocol
from .grammar import Grammar, GrammarError, Grammars
from .replica import POLL_INTERVAL, Replica
from .router import Router
from .server_link import ServerLink

log = logging.getLogger(__name__)
STATS_EVERY = 0.5  # seconds between statistics for the server
ENOUGH = 100  # verified drafts, before a line speaks of their speed: the first ones are measurements of noise
REPORT_EVERY = 60.0  # seconds between the log's lines about speculation, at least
AUDIT_AFTER = 1.0  # seconds without a sequence before the block audit
GRAMMAR_POLL = 2e-3  # seconds between looks at the grammar processes while nothing else is to be done
DONE = object()


class StepLoop:
    """Schedules all replicas. It runs in rank 0's main thread."""

    def __init__(
        self, replicas: list[Replica], link: ServerLink, accept: Callable[[protocol.Switch], bool] = lambda _: True
    ):
        """accept: whether to switch to another model; asked when nothing is open."""
        self.replicas = replicas
        self.switch: protocol.Switch | None = None  # why `run` returned, where it was not drained
        self._accept = accept
        self.router = Router(replicas)
        self.link = link
        self._grammars = Grammars()
        self._draining = False
        self._code = errors.OK
        self._stats_due = 0.0
        self._was_idle = True
        self._audit: Iterator[None] = iter(())
        self._said = 0.0, 0  # when the log had a line about speculation, and how many drafts there had been
        self._patience: float | None = None  # seconds to wait before the audit goes on; None: it is complete

    def run(self) -> int:
        """Serve until drained or switched; the exit code. Raises FatalError when the server process goes away."""
        try:
            return self._run()
        finally:
            self._grammars.close()

    def _run(self) -> int:
        while True:
            self._receive_requests()
            blocked = [replica for replica in self.replicas if not replica.plan() and replica.busy]
            if blocked:
                self._finish(blocked)
            elif self._draining and self._idle:
                self._report(self._stats(), last=True)
                for replica in self.replicas:
                    replica.executor.start(protocol.Plan(step=-1, stop=self._code))
                return self._code
            elif self.switch is not None and self._idle:
                if self._accept(self.switch):
                    plan = protocol.Plan(step=-1, stop=errors.OK, switch=protocol.encode_switch(self.switch))
                    for replica in self.replicas:
                        replica.executor.start(plan)
                    return errors.OK
                self.switch = None

    @property
    def _idle(self) -> bool:
        return not self._grammars.pending and all(replica.idle for replica in self.replicas)

    def _receive_requests(self) -> None:
        idle = self._idle and not self._draining and self.switch is None
        if idle and not self._was_idle:
            self._check_idle()
        self._was_idle = idle
        messages = self.link.receive(self._patience if idle else self._pause)
        if idle and not messages:
            self._patience = None if next(self._audit, DONE) is DONE else 0.0
        for message in messages:
            if isinstance(message, protocol.Request):
                self._admit(message)
            elif isinstance(message, protocol.Vocabulary):
                self._grammars.know(message)
            elif isinstance(message, protocol.Abort):
                self._grammars.abort(message.ids)
                for replica in self.replicas:
                    replica.scheduler.abort(message.ids)
            elif isinstance(message, protocol.Switch):
                self.switch = message
            else:
                self._draining, self._code = True, message.code
        made, ended = self._grammars.take()
        for request, grammar in made:
            self._admit(request, grammar)
        deltas = [delta for one in ended for replica in self.replicas for delta in replica.scheduler.end(one)]
        if deltas:
            self.link.send(protocol.Deltas(deltas))
        if self.link.signalled:
            self.link.signalled = False
            self.link.send(protocol.Draining())  # the server knows the open requests and answers with Drain

    @property
    def _pause(self) -> float:
        """How long to wait for messages where there is something to do: grammar processes may be all that works."""
        return GRAMMAR_POLL if self._grammars.busy and not any(replica.busy for replica in self.replicas) else 0.0

    def _admit(self, request: protocol.Request, grammar: Grammar | GrammarError | None = None) -> None:
        """Queue a request, or have its grammar compiled first. grammar: compiled, or why it is not.

        An exception fails this request alone: no value of a request may end the job.
        """
        try:
            if isinstance(grammar, GrammarError):
                raise grammar
            if request.grammar and grammar is None:
                self._grammars.compile(request)
            else:
                self.router.add(request, grammar)
            return
        except GrammarError as error:
            why, status = str(error), error.status
        except ValueError as error:  # the server checks lengths
            why, status = str(error), 400
        except Exception as error:
            log.exception("a request cannot be scheduled")
            why, status = f"the scheduler failed on this request: {type(error).__name__}: {error}", 500
        self._grammars.abort([request.id])
        if isinstance(grammar, Grammar):
            grammar.drop()
        self.link.send(protocol.Deltas([protocol.Delta(request.id, finish="error", error=why, status=status)]))

    def _check_idle(self) -> None:
        """Check the accounting once the last sequence has ended.

        Only the counts are checked at once, so that a new request does not wait. All blocks are audited after a pause,
        a slice at a time, as long as no request comes.
        """
        for replica in self.replicas:
            replica.scheduler.check_empty()
        stats = self._stats()
        self._report(stats)
        self.link.send(protocol.Deltas([], stats))
        self._audit = itertools.chain.from_iterable(replica.scheduler.audit() for replica in self.replicas)
        self._patience = AUDIT_AFTER

    def _report(self, stats: protocol.Stats, last: bool = False) -> None:
        """Log what speculation is worth each time that there are twice as many drafts, and last: logs of weeks stay
        short."""
        then, before = self._said
        drafts = tokens = right = 0
        for more, guessed, *accepted in stats.speculation.values():
            drafts, tokens, right = drafts + more, tokens + guessed, right + sum(accepted)
        early = (time.monotonic() < then + REPORT_EVERY or drafts < 2 * before) and not last
        if drafts == before or early or not stats.plain_seconds:
            return
        self._said = time.monotonic(), drafts
        factor = stats.plain_seconds / stats.speculation_seconds
        worth = (
            f"; steps with guesses gave tokens {factor:.2f} times as fast as steps without" if drafts >= ENOUGH else ""
        )
        log.info("speculation: %d of %d guessed tokens were right%s", right, tokens, worth)

    def _finish(self, blocked: list[Replica]) -> None:
        """Send the server the results of one step of each blocked replica, as far as they are here.

        blocked: the replicas that cannot start another step. Waits for a moment if none has a result.
        """
        if len(self.replicas) == 1:
            blocked[0].wait_with_progress()
        elif not any([replica.wait(0) for replica in blocked]):
            for replica in self.replicas:
                replica.executor.progress()
            blocked[0].wait(POLL_INTERVAL)
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
        speculation: dict[str, list[int]] = {}
        for replica in self.replicas:
            counts = msgspec.structs.asdict(replica.stats())
            for source, found in counts.pop("speculation").items():
                pairs = itertools.zip_longest(speculation.get(source, []), found, fillvalue=0)
                speculation[source] = [a + b for a, b in pairs]
            total.update(counts)
        return protocol.Stats(**total, speculation=speculation)
