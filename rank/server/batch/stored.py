"""A server's batches: each is a file of the store, is answered in its turn, and outlives the server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ....errors import FatalError
from ..api_error import ApiError
from ..file_store import FULL, FileStore, StoredFile, cannot_write
from ..session import Session
from ..text_engine import TextEngine
from .journal import Entry, NoRoom, atomically
from .setup import setup
from .stored_run import Mistake, StoredRun, validate

log = logging.getLogger("phalanx.batch")
MOST_BATCHES = 1000
LOOK_EVERY = 60.0  # seconds between looks for batches whose time is over while they wait
TRY_AGAIN = 60.0  # seconds until a batch is gone on with that found no room on the disk
ENDS = ("completed", "failed", "expired", "cancelled")


class StoredBatch(msgspec.Struct, kw_only=True):
    """OpenAI's batch object, and what the server needs beside it."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    model: str
    status: str = "validating"
    errors: list[dict[str, Any]] = []
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    metadata: dict[str, str] | None = None
    owner: str
    setup: dict[str, Any] = {}  # what the answers depend on besides the requests

    @property
    def over(self) -> bool:
        return self.status in ENDS

    def enter(self, status: str) -> None:
        """Change the status, and note when."""
        self.status = status
        setattr(self, f"{status}_at", int(time.time()))

    def body(self) -> dict[str, Any]:
        """As clients see it."""
        own = ("owner", "setup", "total", "completed", "failed", "prompt_tokens", "output_tokens", "errors")
        shown = {name: getattr(self, name) for name in self.__struct_fields__ if name not in own}
        return {
            **shown,
            "object": "batch",
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": {
                "input_tokens": self.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": self.output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self.prompt_tokens + self.output_tokens,
            },
        }


class StoredBatches:
    """Answers one batch after the other, the oldest first. `used` is told whose tokens each answer took, and `ended` of
    each session.
    """

    def __init__(
        self,
        files: FileStore,
        sessions: TextEngine,
        used: Callable[[str, int, int], None],
        ended: Callable[[Session], None],
    ):
        self.files = files
        self._sessions = sessions
        self._used = used
        self._ended = ended
        self._batches: dict[str, StoredBatch] = {}
        self._more = asyncio.Event()
        self._in_hand: set[str] = set()  # ids of those that are worked on
        self._runs: dict[str, StoredRun] = {}  # of those in hand, by their ids
        self._tasks: set[asyncio.Task[Any]] = set()
        for path in files.batches.glob("batch_*.json"):
            try:
                batch = msgspec.json.decode(path.read_bytes(), type=StoredBatch)
            except (OSError, msgspec.DecodeError) as error:
                log.warning("%s is no batch: %s", path, error)
                continue
            self._batches[batch.id] = batch
        self._batches = dict(sorted(self._batches.items(), key=lambda one: one[1].created_at))

    def start(self) -> None:
        """Begin to work, on the loop that runs."""
        self._begin(self._work())
        self._begin(self._expire())

    def _begin(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """What is unfinished is gone on with by the next server."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self.files.close()

    def all(self, owner: str) -> list[dict[str, Any]]:
        """One owner's, the oldest first."""
        return [self._current(one).body() for one in self._batches.values() if one.owner == owner]

    def get(self, id: str, owner: str) -> StoredBatch:
        """Raises ApiError 404, also for somebody else's."""
        batch = self._batches.get(id)
        if batch is None or batch.owner != owner:
            raise ApiError(404, f"there is no batch {id[:100]!r} here", code="batch_not_found")
        return self._current(batch)

    def check_unused(self, file: StoredFile) -> None:
        """Raises ApiError where a batch still reads the file."""
        for one in self._batches.values():
            if one.input_file_id == file.id and not one.over:
                raise ApiError(400, f"the file {file.id} is the input of {one.id}: cancel that first", code="in_use")

    def create(
        self, owner: str, input: str, endpoint: str, window: str, hours: int, metadata: dict[str, str] | None
    ) -> dict[str, Any]:
        """A new batch, which begins when those before it are over. Raises ApiError."""
        file = self.files.get(input, owner, "input_file_id")
        if file.purpose != "batch":
            raise ApiError(400, f"the file {input} has the purpose {file.purpose}: expected batch", "input_file_id")
        self._forget_old()
        now = int(time.time())
        batch = StoredBatch(
            id=f"batch_{uuid.uuid4().hex[:24]}",
            endpoint=endpoint,
            input_file_id=input,
            completion_window=window,
            created_at=now,
            expires_at=now + 3600 * hours,
            model=self._sessions.names[0],
            metadata=metadata,
            owner=owner,
        )
        self._save(batch)
        self._batches[batch.id] = batch
        self._more.set()
        return batch.body()

    def cancel(self, id: str, owner: str) -> dict[str, Any]:
        """Stop a batch. Raises ApiError where it is over."""
        batch = self.get(id, owner)
        if batch.over or batch.status == "finalizing":
            raise ApiError(400, f"the batch is {batch.status}: there is nothing to cancel", code="batch_over")
        if batch.status != "cancelling":
            batch.enter("cancelling")
            if batch.id in self._runs:
                self._runs[batch.id].stop()
            elif batch.id not in self._in_hand:
                self._take(batch)
            self._more.set()
            with contextlib.suppress(ApiError):  # it is stopped all the same, and saved at its end
                self._save(batch)
        return batch.body()

    def _forget_old(self) -> None:
        """Make room for one more."""
        for batch in list(self._batches.values()):
            if len(self._batches) < MOST_BATCHES:
                return
            if batch.over:
                self._path(batch).unlink(missing_ok=True)
                self._path(batch, "journal").unlink(missing_ok=True)
                del self._batches[batch.id]
        if len(self._batches) >= MOST_BATCHES:
            raise ApiError(429, f"{MOST_BATCHES} batches are waiting already: try again later", code="queue_full")

    def _path(self, batch: StoredBatch, kind: str = "json") -> Path:
        return self.files.batches / f"{batch.id}.{kind}"

    def _save(self, batch: StoredBatch) -> None:
        """Raises ApiError 507."""
        try:
            with atomically(str(self._path(batch))) as out:
                out.write(msgspec.json.encode(batch))
        except OSError as error:
            raise cannot_write("batch", error) from None

    def _current(self, batch: StoredBatch) -> StoredBatch:
        """With what is counted meanwhile."""
        if batch.id in self._runs:
            counts = self._runs[batch.id].counts()
            batch.completed, batch.failed = counts.answered, counts.failed
            batch.prompt_tokens, batch.output_tokens = counts.prompt_tokens, counts.output_tokens
        return batch

    # The work.

    async def _work(self) -> None:
        while True:
            self._more.clear()
            waiting = [one for one in self._batches.values() if not one.over and one.id not in self._in_hand]
            # One that an earlier server was to cancel does not wait for its turn.
            waiting.sort(key=lambda one: one.status != "cancelling")
            if not waiting:
                await self._more.wait()
            elif not await self._handle(waiting[0]):
                return

    def _take(self, batch: StoredBatch) -> None:
        """End one from the queue beside the one that runs: it does not wait for its turn."""
        self._in_hand.add(batch.id)
        self._begin(self._handle(batch))

    async def _expire(self) -> None:
        """End those in the queue whose time is over; one that is in hand has a timer of its own."""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            for batch in self._batches.values():
                if not batch.over and batch.id not in self._in_hand and batch.expires_at <= time.time():
                    self._take(batch)

    async def _handle(self, batch: StoredBatch) -> bool:
        """Bring one batch to its end. False: the ranks are gone for good, and the next server goes on."""
        self._in_hand.add(batch.id)
        try:
            while not batch.over:
                try:
                    await self._do(batch)
                except ApiError as error:
                    link = self._sessions.link
                    if error.status == 503 and (link.state == "failed" or link.draining):
                        return False
                    if error.status == FULL:
                        await self._wait_for_room(batch, error)
                    elif error.status != 503:  # after that others will come, which _do waits for
                        self._give_up(batch, Mistake(error.code or "failed", error.message))
                except (NoRoom, OSError) as error:
                    await self._wait_for_room(batch, error)
                except Exception as error:  # one batch must not end the others
                    if not isinstance(error, FatalError):
                        log.exception("batch %s failed", batch.id)
                    self._give_up(batch, Mistake("failed", str(error)))
        finally:
            self._in_hand.discard(batch.id)
        return True

    async def _wait_for_room(self, batch: StoredBatch, error: Exception) -> None:
        """Its answers are in the journal: nothing is lost, and nothing is begun until there may be room."""
        log.warning("batch %s waits for room and is tried again every %.0f s: %s", batch.id, TRY_AGAIN, error)
        batch.errors = [Mistake("files_full", "the server cannot write to its files: the batch waits for room").body()]
        self._more.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._more.wait(), TRY_AGAIN)

    async def _do(self, batch: StoredBatch) -> None:
        """Bring one batch to its end."""
        in_thread = asyncio.get_running_loop().run_in_executor
        file = self.files.get(batch.input_file_id, batch.owner)
        input = self.files.path(file)
        if not input.exists():  # to wait for room would be to wait for ever
            raise ApiError(404, f"the bytes of file {file.id} are no longer there", code="file_not_found")
        fresh = batch.status == "validating"
        batch.errors = []  # it waits for room no longer
        if fresh:
            batch.total, mistakes = await in_thread(None, validate, str(input), batch.endpoint)
            if mistakes:
                self._give_up(batch, *mistakes)
                return
            await self._sessions.link.wait_ready()
            batch.setup = await in_thread(None, setup, self._sessions.config)
            if batch.status == "validating":  # and not cancelled meanwhile
                batch.enter("in_progress")
            self._save(batch)
        count = partial(self._count, batch)
        run = StoredRun(input, self._path(batch, "journal"), self._sessions, count, self._ended)
        self._runs[batch.id] = run
        timer = asyncio.get_running_loop().call_later(max(0.0, batch.expires_at - time.time()), run.stop)
        try:
            if batch.status in ("in_progress", "finalizing"):  # the latter: a server ended while it wrote the files
                run.failure = "" if fresh else await self._changed(batch)
                if not run.failure:
                    await run.run()
                if not run.stopped and not run.failure and run.counts().done < batch.total:
                    raise self._sessions.link.unavailable()
            await self._finish(batch, file.filename.removesuffix(".jsonl"), run)
        finally:
            timer.cancel()
            self._current(batch)
            del self._runs[batch.id]
            run.close(remove=batch.over)

    async def _changed(self, batch: StoredBatch) -> str:
        """What answers depend on, and is not as it was when the batch was begun; "" where nothing is."""
        await self._sessions.link.wait_ready()
        now = await asyncio.get_running_loop().run_in_executor(None, setup, self._sessions.config)
        for name, before in batch.setup.items():
            if now.get(name) != before:
                return f"{name} was {before!r} when the batch was begun and is {now.get(name)!r} now: create it again"
        return ""

    async def _finish(self, batch: StoredBatch, name: str, run: StoredRun) -> None:
        """Write the files of a batch that is at its end."""
        if run.failure:
            end = "failed"
            batch.errors = [Mistake("failed", run.failure).body()]
        elif batch.status == "cancelling":
            end = "cancelled"
        else:
            if run.counts().done < batch.total:
                batch.expired_at = int(time.time())  # known still when the files are written by a later attempt
            end = "expired" if batch.expired_at else "completed"
            batch.enter("finalizing")
            self._save(batch)
        before = batch.status
        made = [self.files.new(f"{name}_{kind}.jsonl", "batch_output", batch.owner) for kind in ("output", "errors")]
        try:
            await self._write(batch, end, made, run)
        except BaseException:  # all of it is done again
            batch.status = before if batch.over else batch.status
            batch.output_file_id = batch.error_file_id = None
            for file in made:
                self.files.drop(file)
            raise

    async def _write(self, batch: StoredBatch, end: str, made: list[StoredFile], run: StoredRun) -> None:
        """The output file and the error file, of which an empty one is left out, and the batch as it ended."""
        paths = [self.files.path(file) for file in made]
        count = await asyncio.get_running_loop().run_in_executor(None, run.finish, end, paths[0], paths[1])
        batch.total = batch.total or count  # one that was cancelled in the queue was not counted before
        self._current(batch)
        kept: list[str | None] = []
        for file, path in zip(made, paths, strict=True):
            if path.exists() and path.stat().st_size:
                self.files.add(file)
                kept.append(file.id)
            else:
                path.unlink(missing_ok=True)
                kept.append(None)
        batch.output_file_id, batch.error_file_id = kept
        batch.enter(end)
        self._save(batch)

    def _give_up(self, batch: StoredBatch, *why: Mistake) -> None:
        batch.errors = [one.body() for one in why]
        batch.enter("failed")
        try:
            self._path(batch, "journal").unlink(missing_ok=True)
            self._save(batch)
        except (ApiError, OSError) as error:
            log.error("batch %s: %s", batch.id, error)

    def _count(self, batch: StoredBatch, entry: Entry) -> None:
        self._used(batch.owner, entry.prompt_tokens, entry.output_tokens)
