"""The end of a job's time: a successor is submitted, and takes over once it is ready.

The job that ends knows its successor by what that writes into the registry. Until it is ready this one goes on; then it
takes no new requests, gives up what only one server may hold, and finishes what is open. Whatever happens to the
successor, this job has drained before its time is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import BinaryIO

from ... import linux_calls
from . import server_registry
from .blocking import on_disk
from .config import PREDECESSOR, HandoverConfig
from .registration import READY

log = logging.getLogger("phalanx.handover")
LOOK = 1.0  # seconds between two looks at the clock, the registry and the batch system
PATIENCE = 60.0  # seconds for a command of the batch system
AGAIN = 10.0  # seconds until a successor is submitted again; twice as many each time
MAX_AGAIN = 300.0
MAX_SUBMITTED = 5  # successors in all
ASKED_EVERY = 15.0  # seconds between two questions to the batch system
OUTPUT = 1 << 16  # bytes that are read of what a command says
UNSEEN = 2  # so many answers without the job mean that it is over
FRESH = 20.0  # seconds since the last heartbeat of a successor that runs
NOTICE = 1.5  # seconds in which gateways see that this job takes no more
RELEASE = 30.0  # seconds for giving up what one server alone may hold
NUMBER = re.compile(r"\b\d[\w.\[\]-]*")
TIMED_OUT = 124  # the code of a command that did not end


class Handover:
    """Runs until this job has to drain. name: of this job's file in the registry, which is in `place`."""

    def __init__(self, config: HandoverConfig, place: Path, name: str, host: str):
        self.config = config
        self.begun = False  # the successor is ready, or the time is over: nothing new is taken
        self._place, self._name, self._host = place, name, host
        self._environ = config.environ | {PREDECESSOR: name}
        self._submitted = 0  # successors
        self._unread = False  # the registry could not be read, and that has been said
        self._unseen = 0  # answers of the batch system without the successor

    async def run(self, release: Callable[[], Awaitable[None]], drain: Callable[[], None]) -> None:
        """release: gives up what one server alone may hold. drain: finishes what is open."""
        config = self.config
        successor = asyncio.ensure_future(self._watch())
        try:
            while time.time() < config.drain_at and not successor.done():  # not one sleep: clocks are set
                await asyncio.wait([successor], timeout=min(LOOK, max(0.0, config.drain_at - time.time())))
            if successor.done():
                log.warning("job %s is ready and takes over: open requests are finished here", successor.result())
            else:
                log.warning("the time is nearly over and no successor is ready: open requests are finished")
        finally:
            successor.cancel()
        self.begun = True
        await asyncio.sleep(min(NOTICE, max(0.0, config.drain_at - time.time())))
        try:
            await asyncio.wait_for(release(), RELEASE)
        except Exception as error:  # whatever happens, what is open is finished in time
            log.error("the files could not be given up before this job's end", exc_info=error)
        drain()

    async def _watch(self) -> str:
        """The name of the successor that is ready, whatever fails meanwhile: without one this job drains in time."""
        while True:
            try:
                return await self._successor()
            except Exception as error:
                log.error("the successor could not be looked after, which is tried again", exc_info=error)
                await asyncio.sleep(AGAIN)

    async def _successor(self) -> str:
        """Wait until it is time, submit a successor, and another where that ends; return once one is ready."""
        while time.time() < self.config.submit_at:
            await asyncio.sleep(min(LOOK, max(0.01, self.config.submit_at - time.time())))
        pause = AGAIN
        while self._submitted < MAX_SUBMITTED:
            self._submitted += 1
            code, number = await self._submit()
            if code not in (0, TIMED_OUT):
                self._submitted -= 1
            else:
                # One that may have been submitted gets half of the time that is left, as two of them would both go on.
                patience = max(AGAIN, (self.config.drain_at - time.time()) / 2) if code else math.inf
                if name := await self._ready(number, patience):
                    return name
            if name := await self._ready("", pause):  # that was taken for one that has ended, or was not submitted
                return name
            pause = min(2 * pause, MAX_AGAIN)
        log.error("%s successors were submitted and none has become ready: no more are submitted", self._submitted)
        return await self._ready("", math.inf, last=True)

    async def _submit(self) -> tuple[int, str]:
        """The command's exit code, and the number of the new job: "" where its output tells none, or is cut off."""
        config = self.config
        code, output, errors = await _run(config.command, config.script, config.directory, self._environ)
        # Lines of sites and wrappers stand before it.
        found = NUMBER.search((output.strip().splitlines() or [""])[-1])
        number = found[0] if found and not code else ""
        said = f"{config.command[0]}: {(errors.strip() or output.strip())[-500:]}"
        if not code:
            log.warning("submitted the successor%s", f", job {number}" if number else "")
        elif code == TIMED_OUT:
            log.error("no end of the command that submits, so there may be a successor: %s", said)
        else:
            log.error("no successor could be submitted, which is tried again: %s", said)
        return code, number

    async def _ready(self, number: str, patience: float, last: bool = False) -> str:
        """The name of the successor's file once it is ready; "" where the successor has ended, or after `patience`.

        last: it is waited for even where one has ended.
        """
        self._unseen, seen, now = 0, "", time.monotonic()
        beats: dict[str, tuple[float, float]] = {}  # of each job: the last heartbeat, and when it was another one
        asked, until = now, now + patience
        job = f", job {number}" if number else ""
        while True:
            alive = False
            for name, entry in (await self._registered()).items():
                if beats.setdefault(name, (entry.beat, -math.inf))[0] != entry.beat:
                    beats[name] = entry.beat, time.monotonic()
                # However far the clocks differ, a heartbeat that changes is of a job that runs.
                fresh = abs(time.time() - entry.beat) < FRESH or time.monotonic() - beats[name][1] < FRESH
                if name == self._name or not self._is(entry, number) or not fresh:
                    continue
                if not seen and not entry.predecessor:
                    log.warning("%s is not handed on, so the successor%s may have another key", PREDECESSOR, job)
                seen, alive = name, True
                if entry.state == READY:
                    return name
            now = time.monotonic()
            over = bool(seen) and await self._removed(seen)
            if now - asked >= ASKED_EVERY:
                asked, over = now, await self._over(number) or over
            if over and not alive and not last:  # a job that tells of itself is there, whatever the batch system says
                log.error("the successor%s has ended before it was ready", job or f" {seen}")
                return ""
            if not alive and now >= until:
                return ""
            await asyncio.sleep(LOOK)

    async def _registered(self) -> dict[str, server_registry.RegisteredServer]:
        """The registry's jobs; none where its file system fails for the moment."""
        try:
            found = await on_disk(server_registry.running, self._place, self._host)
        except OSError as error:
            if not self._unread:
                log.warning("the registry cannot be read, which is tried again: %s", error)
            self._unread = True
            return {}
        self._unread = False
        return found

    async def _removed(self, name: str) -> bool:
        """Whether a file of the registry is certainly gone."""
        try:
            return not await on_disk((self._place / f"{name}.json").exists)
        except OSError:
            return False

    def _is(self, job: server_registry.RegisteredServer, number: str) -> bool:
        if job.predecessor:
            return job.predecessor == self._name
        return bool(number) and job.batch.partition(".")[0] == number.partition(".")[0]

    async def _over(self, number: str) -> bool:
        """Whether the batch system has reported several times that it no longer has the successor."""
        if not number or not self.config.look:
            return False
        words = [word.format(job=number) for word in self.config.look]
        code, output, errors = await _run(words, "", self.config.directory, self._environ)
        gone = bool(re.search(r"nvalid|nknown|not found|finished", output + errors)) if code else not output.strip()
        self._unseen = self._unseen + 1 if gone else 0
        return self._unseen >= UNSEEN


async def _run(words: list[str], script: str, directory: str, environ: dict[str, str]) -> tuple[int, str, str]:
    """Exit code, output and errors of a command; 127 where it cannot be run, TIMED_OUT where it does not end.

    Files take its output, not pipes: it is also there of a command that is ended, and nothing that the command leaves
    behind keeps it open.
    """
    with contextlib.ExitStack() as opened:
        given, output, errors = (
            opened.enter_context(open(linux_calls.memory_file(name), "w+b")) for name in ("stdin", "stdout", "stderr")
        )
        given.write(script.encode())
        given.seek(0)
        try:
            child = await asyncio.create_subprocess_exec(
                *words, cwd=directory, env=environ, stdin=given, stdout=output, stderr=errors, start_new_session=True
            )
        except OSError as error:
            return 127, "", str(error)
        code = TIMED_OUT
        try:
            code = await asyncio.wait_for(child.wait(), PATIENCE)
        except TimeoutError:
            pass
        finally:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                await child.wait()
        said = [_end(file) for file in (output, errors)]
        if code == TIMED_OUT:
            said[1] += f" (no end within {PATIENCE:g} s)"
        return code, said[0], said[1]


def _end(file: BinaryIO) -> str:
    """The last that was written to a file."""
    file.seek(max(0, os.fstat(file.fileno()).st_size - OUTPUT))
    return file.read().decode(errors="replace")
