"""The jobs that a gateway forwards to: read from the registry, probed, and chosen for each request.

Requests go only to addresses of the registry's files, which only their owner can write.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import urllib.parse
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

from ...rank.server import server_registry
from ...rank.server.registration import READY
from ...rank.server.server_registry import RegisteredServer
from .. import http_client

log = logging.getLogger(__name__)
LOOK = 0.5  # seconds between two looks at the registry
PROBE = 2.0  # seconds between two probes of a job's health
FORGET = 600.0  # seconds until a model that no job has any more is unknown
LONGEST_BACK_OFF = 30.0  # seconds
SLACK = 4  # requests that a job may have more than the average before its prefixes go to another
SPREAD = 1.25  # and as a share of the average


class Job:
    """One registered server, as this gateway sees it."""

    def __init__(self, name: str, server: RegisteredServer):
        self.name = name
        self.server = server
        self.open = 0  # requests that this gateway forwards to it now
        self.failures = 0  # probes and connections that failed, one after the other
        self.tried_again = 0.0  # on the clock of time.monotonic: before that nothing is sent
        self.probed = 0.0  # on the same clock

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(self.server.models or [self.server.model])

    @property
    def ejected(self) -> bool:
        """Whether it has failed, and has not answered a probe since."""
        return self.failures > 0

    @property
    def ready(self) -> bool:
        return self.server.state == READY and not self.ejected

    @property
    def load(self) -> int:
        """Open requests: of this gateway, or, where that is more, those that the job has reported."""
        return max(self.open, self.server.load)

    def failed(self, why: object) -> None:
        """Send nothing more until a probe succeeds, the first of which comes later after each failure."""
        if not self.ejected:
            log.warning("job %s at %s does not answer: %s", self.name, self.server.url, why)
        self.tried_again = time.monotonic() + min(LONGEST_BACK_OFF, 0.5 * 2**self.failures)
        self.failures += 1

    def answered(self) -> None:
        """A probe found it healthy."""
        if self.ejected:
            log.warning("job %s at %s answers again", self.name, self.server.url)
        self.failures = 0


class JobTable:
    """The current jobs of a directory. open_to_all: others can reach the gateway, so a job has to have a key."""

    def __init__(self, directory: Path, host: str, open_to_all: bool = False):
        self.jobs: dict[str, Job] = {}
        self.known: dict[str, float] = {}  # names of models, and when a job last had each, on the clock of monotonic
        self.keys: set[str] = set()  # of the current jobs; of the last ones that had any, until others come
        self.open_to_all = open_to_all
        self._directory, self._host = directory, host
        self._passed_over: set[str] = set()  # names of files that the log has told of
        self._changed = asyncio.Event()
        # A shared file system may hang: that holds up this thread, and requests go on by what was read before.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="registry")

    async def refresh(self) -> None:
        """Read the registry."""
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._thread, server_registry.running, self._directory, self._host)
        found = {name: server for name, server in found.items() if self._usable(name, server)}
        for name in self.jobs.keys() - found.keys():
            del self.jobs[name]
        for name, server in found.items():
            job = self.jobs.get(name)
            if job is None or job.server.url != server.url or job.server.start != server.start:
                self.jobs[name] = Job(name, server)
            else:
                job.server = server
        now = time.monotonic()
        self.known |= dict.fromkeys((model for job in self.jobs.values() for model in job.models), now)
        self.known = {model: seen for model, seen in self.known.items() if now - seen <= FORGET}
        self.keys = {job.server.key for job in self.jobs.values() if job.server.key} or self.keys
        self.wake()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def wake(self) -> None:
        """Have those look again who wait for a job."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self, seconds: float) -> None:
        """Wait until the jobs may have changed, for so long at most."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    def _usable(self, name: str, server: RegisteredServer) -> bool:
        """Whether requests may go to this server from here; the log has the reason, once."""
        parts = urllib.parse.urlsplit(server.url)
        why = ""
        if parts.scheme not in ("http", "https", "unix") or (parts.scheme != "unix" and not parts.port):
            why = f"{server.url!r} is no address"
        elif server.host != self._host and (parts.scheme == "unix" or http_client.is_loopback(parts.hostname or "")):
            why = f"it listens on {server.host} for that host only: start it with --host 0.0.0.0"
        elif self.open_to_all and not server.key:
            why = "it takes requests without a key, and other machines reach this gateway"
        if why and name not in self._passed_over:
            self._passed_over.add(name)
            log.warning("job %s is passed over: %s", name, why)
        return not why

    def of(self, model: str) -> list[Job]:
        """The jobs in any state that a request for this model may go to.

        A server answers to any name unless it is strict, so where all jobs have the same models any name is theirs.
        """
        jobs = list(self.jobs.values())
        named = [job for job in jobs if model in job.models]
        if named or not model:
            return named or jobs
        return jobs if len({job.models for job in jobs}) == 1 and self.known.keys() == set(jobs[0].models) else []

    def may_come(self, model: str) -> bool:
        """Whether waiting for a job of this model makes sense: there was one lately, or no job is known at all."""
        return not model or not self.known or model in self.known or len(self.of(model)) > 0

    def choose(self, model: str, prefix: bytes, passed: Iterable[Job] = ()) -> Job | None:
        """The job for a request, or None while none is ready. passed: jobs that have just refused it."""
        ready = [job for job in self.of(model) if job.ready and job not in passed]
        if not ready:
            return None
        least = min(ready, key=lambda job: job.load)
        if not prefix:
            return least
        most = max(SLACK + least.load, SPREAD * sum(job.load for job in ready) / len(ready))
        # Rendezvous hashing: a job that comes or goes moves only its own prefixes.
        order = sorted(ready, key=lambda job: blake2b(prefix + job.name.encode(), digest_size=8).digest())
        return next(job for job in order if job.load <= most)
