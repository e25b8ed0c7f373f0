"""Threads for work that blocks, so that the event loop does not wait for it.

A disk that takes seconds for an fsync holds threads of the disk's own pool only. Work that takes a core instead, such
as gunzip or the decoding of a large body, has another pool: it goes on while the disk hangs. What keys could keep
busy for long, such as tokenising, has `Lanes`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
_disk = ThreadPoolExecutor(8, thread_name_prefix="disk")
_bodies = ThreadPoolExecutor(2, thread_name_prefix="bodies")
# In a thread of Lanes: whose work it does, as Call.owner has it.
owner: contextvars.ContextVar[str] = contextvars.ContextVar("owner", default="")


class Lanes:
    """Threads of which each key has a share at most: one whose work takes long holds up no other."""

    def __init__(self, threads: int, share: int, name: str):
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._share = share
        self._lanes: dict[str, asyncio.Semaphore] = {}  # by key

    async def run(self, whose: str, work: Callable[[], T]) -> T:
        """Have some work of a key done. Work that is cancelled before it has begun is not done; else it goes on, and
        keeps its place."""
        loop = asyncio.get_running_loop()
        lane = self._lanes.setdefault(whose, asyncio.Semaphore(self._share))

        def leave(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(lane.release)

        await lane.acquire()
        context = contextvars.copy_context()
        context.run(owner.set, whose)
        try:
            done = self.pool.submit(context.run, work)
        except BaseException:  # it was shut down
            lane.release()
            raise
        done.add_done_callback(leave)
        return await asyncio.wrap_future(done)


async def on_disk(function: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
    """Run work that waits for a file system. Cancelling this does not end the work: its thread brings it to its end.

    The function must not wait for other work of the pool.
    """
    return await asyncio.get_running_loop().run_in_executor(_disk, lambda: function(*args, **more))


async def to_its_end(function: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
    """Runs like on_disk; where this is cancelled, it is over only when the work is: what the work holds, others may
    take."""
    work = asyncio.ensure_future(on_disk(function, *args, **more))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


def begin_on_disk(function: Callable[[], object]) -> None:
    """Run work that waits for a file system without waiting for its end. What it raises is logged."""

    def run() -> None:
        try:
            function()
        except Exception:
            log.exception("work on the disk failed")

    _disk.submit(run)


async def on_body(function: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
    """Run work on a large body that takes a core, such as gunzip or decoding. Cancelling this does not end the work."""
    return await asyncio.get_running_loop().run_in_executor(_bodies, lambda: function(*args, **more))
