"""Keeps a server's file in the registry current: its state at once, a heartbeat and the load every few seconds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from . import server_registry
from .blocking import on_disk
from .server_registry import RegisteredServer

log = logging.getLogger(__name__)
LOOK = 0.2  # seconds between two looks at the state
BEAT = 5.0  # seconds between two heartbeats: the file system is shared, and may be slow
STARTING, READY, DRAINING = "starting", "ready", "draining"


class Registration:
    """A server's entry. `state`, `load` and `has_files` give its contents."""

    def __init__(
        self,
        path: str,
        job: RegisteredServer,
        state: Callable[[], str],
        load: Callable[[], int],
        has_files: Callable[[], bool],
    ):
        self.path = Path(path)
        self.job = job
        self._state, self._load, self._has_files = state, load, has_files
        self._written = 0.0  # on the clock of time.monotonic
        self._warned = False
        self._task: asyncio.Task[None] | None = None
        self._writing: asyncio.Future[None] | None = None

    @property
    def name(self) -> str:
        return self.path.stem

    def start(self) -> None:
        """Write the entry, and keep it current from now on."""
        self._task = asyncio.ensure_future(self._keep())

    async def close(self) -> None:
        """Remove the entry. What is being written meanwhile comes first."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task, *([self._writing] if self._writing is not None else [])])
        await on_disk(server_registry.remove, self.path)

    async def _keep(self) -> None:
        while True:
            state, has_files = self._state(), self._has_files()
            changed = (state, has_files) != (self.job.state, self.job.has_files)
            if changed or time.monotonic() - self._written >= BEAT or not self._written:
                self._writing = asyncio.ensure_future(self._write(state, has_files))
                await asyncio.shield(self._writing)
            await asyncio.sleep(LOOK)

    async def _write(self, state: str, has_files: bool) -> None:
        self._written = time.monotonic()
        self.job = msgspec.structs.replace(
            self.job, state=state, load=self._load(), has_files=has_files, beat=time.time()
        )
        try:
            await on_disk(server_registry.write, self.path, self.job)
        except OSError as error:
            if not self._warned:
                log.warning("no job file, so `phalanx chat` needs --url: %s: %s", self.path, error.strerror)
            self._warned = True


def gave_files_up(path: Path, host: str) -> bool:
    """Whether a job certainly writes no files of --file-store any more, by its entry, seen from `host`."""
    try:
        job = server_registry.read(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    except ValueError:  # of another version
        return True
    beats = server_registry.beats(job) and not server_registry.over(job, host)
    return not beats or (job.state == DRAINING and not job.has_files)
