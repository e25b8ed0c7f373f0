"""A server's batches: each is a file of the store, is answered in the order of arrival, and outlives the server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec

from ....errors import FatalError
from ..api_error import ApiError
from ..blocking import on_disk, to_its_end
from ..durable import atomically
from ..file_store import FULL, FileStore, StoredFile, cannot_write
from ..session import Session
from ..shares import Budget, SharedStore
from ..text_engine import TextEngine
from .journal import Entry, NoRoom
from .setup import setup
from .stored_run import Mistake, StoredRun, validate

log = logging.getLogger("phalanx.batch")
MAX_BATCHES = 1000
FLOOR = 10  # batches in the queue for each key, however many keys there are
READERS = 2  # of whole files at a time, so that uploads find threads that are free
LOOK_EVERY = 60.0  # seconds between looks for batches whose time is over while they wait
TRY_AGAIN = 60.0  # seconds until a batch is gone on with that found no room on the disk
P = ParamSpec("P")
T = TypeVar("T")
PREFIXES = {"batch": "batch", "message_batch": "msgbatch"}  # of ids, by kind
ENDS = ("completed", "failed", "expired", "cancelled")


class StoredBatch(msgspec.Struct, kw_only=True):
    """OpenAI's batch object, and what the server needs in addition."""

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
    given_up: int = 0  # of those that failed: had no answer when the batch ended
    kind: str = "batch"  # whose API it came by: OpenAI's, or "message_batch", Anthropic's
    prompt_tokens: int = 0
    output_tokens: int = 0
    metadata: dict[str, str] | None = None
    owner: str
    setup: dict[str, Any] = {}  # what the answers depend on besides the requests

    @property
    def over(self) -> bool:
        return self.status in ENDS

    @property
    def running(self) -> bool:
        return not self.over

    @property
    def key(self) -> str:
        return self.owner

    @property
    def size(self) -> int:
        return 0  # they are bounded by their number: what is in one is bounded

    def enter(self, status: str) -> None:
        """Change the status, and note when."""
        self.status = status
        setattr(self, f"{status}_at", int(time.time()))

    def body(self) -> dict[str, Any]:
        """The batch as clients see it."""
        counts = ("total", "completed", "failed", "given_up", "prompt_tokens", "output_tokens")
        own = ("owner", "kind", "setup", "errors", *counts)
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
    """Answers one batch after the other, the oldest first. `used` gets the owner and tokens of each answer, and `ended`
    each session.
    """

    def __init__(
        self,
        files: FileStore,
        engine: TextEngine,
        used: Callable[[str, int, int], None],
        ended: Callable[[Session], None],
        keys: int = 1,
    ):
        self.files = files
        self._engine = engine
        self._used = used
        self._ended = ended
        self._batches: SharedStore[str, StoredBatch] = SharedStore(MAX_BATCHES, 0)
        self._most_queued = Budget(MAX_BATCHES, keys, FLOOR).quota
        self._saving = asyncio.Lock()
        self._reading = asyncio.Semaphore(READERS)
        self._more = asyncio.Event()
        self._in_hand: set[str] = set()  # ids of those that are worked on
        self._runs: dict[str, StoredRun] = {}  # of those in hand, by their ids
        self._tasks: set[asyncio.Task[Any]] = set()
        self._creating: set[asyncio.Task[Any]] = set()
        self.done = 0  # requests that this server has answered or failed
        found = []
        for path in files.batches.glob("*batch_*.json"):
            try:
                batch = msgspec.json.decode(path.read_bytes(), type=StoredBatch)
            except (OSError, msgspec.DecodeError) as error:
                log.warning("%s is no batch: %s", path, error)
                continue
            found.append(batch)
        for batch in sorted(found, key=lambda one: one.created_at):
            journal = self._path(batch, "journal")
            if not batch.over and journal.exists():
                files.count(batch.id, batch.owner, journal.stat().st_size)
            for old in self._batches.put(batch.id, batch):
                self._remove(old)

    def start(self) -> None:
        """Begin to work, on the loop that runs."""
        self._begin(self._work())
        self._begin(self._expire())

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def stop(self) -> None:
        """Works no more; the next server continues unfinished batches."""
        self.files.closing = True
        while self._creating:  # their clients are told that the server has them
            await asyncio.wait(self._creating)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Stops, and leaves the directory to the next server."""
        await self.stop()
        self.files.close()

    def all(self, owner: str, kind: str = "batch") -> list[StoredBatch]:
        """One owner's, the oldest first."""
        return [self._current(one) for one in self._batches if one.owner == owner and one.kind == kind]

    def unfinished(self) -> int:
        """How many batches of all owners are not over."""
        return sum(not one.over for one in self._batches)

    def get(self, id: str, owner: str, kind: str = "batch") -> StoredBatch:
        """Raises ApiError 404, also for somebody else's."""
        batch = self._batches.get(id)
        if batch is None or batch.owner != owner or batch.kind != kind:
            raise ApiError(404, f"there is no batch {id[:100]!r} here", code="batch_not_found")
        return self._current(batch)

    def check_unused(self, file: StoredFile) -> None:
        """Raises ApiError where a batch still reads the file."""
        for one in self._batches:
            if one.input_file_id == file.id and not one.over:
                raise ApiError(400, f"the file {file.id} is the input of {one.id}: cancel that first", code="in_use")

    async def create(
        self,
        owner: str,
        input: str,
        endpoint: str,
        window: str,
        hours: int,
        metadata: dict[str, str] | None,
        kind: str = "batch",
        total: int = 0,
    ) -> StoredBatch:
        """A new batch, which begins when those before it are over. Raises ApiError."""
        file = self.files.get(input, owner, "input_file_id")
        if file.purpose != "batch":
            raise ApiError(400, f"the file {input} has the purpose {file.purpose}: expected batch", "input_file_id")
        self._check_queue(owner)
        now = int(time.time())
        batch = StoredBatch(
            id=f"{PREFIXES[kind]}_{uuid.uuid4().hex[:24]}",
            kind=kind,
            total=total,
            endpoint=endpoint,
            input_file_id=input,
            completion_window=window,
            created_at=now,
            expires_at=now + 3600 * hours,
            model=self._engine.names[0],
            metadata=metadata,
            owner=owner,
        )
        task = self._begin(self._create(batch, file))
        self._creating.add(task)
        task.add_done_callback(self._creating.discard)
        return await asyncio.shield(task)  # also where the client leaves meanwhile

    async def _create(self, batch: StoredBatch, file: StoredFile) -> StoredBatch:
        self._in_hand.add(batch.id)  # nobody begins it before it is on the disk
        old = self._batches.put(batch.id, batch)
        try:
            await on_disk(self.files.check, file)
            await self._save(batch)
        except BaseException:
            self._batches.pop(batch.id)
            raise
        finally:
            self._in_hand.discard(batch.id)
            for one in old:
                await on_disk(self._remove, one)
        self._more.set()
        return batch

    async def delete(self, batch: StoredBatch) -> None:
        """Remove a batch; its files stay. Raises ApiError where it is not over."""
        if not batch.over or batch.id in self._in_hand:
            raise ApiError(400, f"the batch is {batch.status}: cancel it, and wait for its end", code="batch_not_over")
        self._batches.pop(batch.id)
        await on_disk(self._remove, batch)

    async def cancel(self, id: str, owner: str, kind: str = "batch") -> StoredBatch:
        """Stop a batch. Raises ApiError where it is over."""
        batch = self.get(id, owner, kind)
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
                await asyncio.shield(self._begin(self._save(batch)))
        return batch

    def _check_queue(self, owner: str) -> None:
        """Raises ApiError 429 where there is no room for one batch more."""
        waiting = [one.owner for one in self._batches if not one.over]
        if len(waiting) >= MAX_BATCHES:
            raise ApiError(429, f"{MAX_BATCHES} batches are waiting already: try again later", code="queue_full")
        if (count := waiting.count(owner)) >= self._most_queued:
            raise ApiError(
                429,
                f"{count} batches of this API key are waiting already, and that is its share: try again later",
                code="queue_full",
            )

    def _remove(self, batch: StoredBatch) -> None:
        """Remove what the disk has of a batch, in a thread."""
        for kind in ("json", "journal"):
            self._path(batch, kind).unlink(missing_ok=True)
        self.files.uncount(batch.id)

    def _path(self, batch: StoredBatch, kind: str = "json") -> Path:
        return self.files.batches / f"{batch.id}.{kind}"

    async def _save(self, batch: StoredBatch) -> None:
        """Raises ApiError 507."""
        async with self._saving:  # two that write one batch at once would be in each other's way
            try:
                await on_disk(_write_whole, str(self._path(batch)), msgspec.json.encode(batch))
            except OSError as error:
                raise cannot_write("batch", error) from None

    async def _read_whole(self, function: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
        """Call in a thread what reads a whole file."""
        async with self._reading:
            return await on_disk(function, *args, **more)

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
            waiting = [one for one in self._batches if not one.over and one.id not in self._in_hand]
            # One that an earlier server was to cancel does not wait in the queue.
            waiting.sort(key=lambda one: one.status != "cancelling")
            if not waiting:
                await self._more.wait()
            elif not await self._handle(waiting[0]):
                return

    def _take(self, batch: StoredBatch) -> None:
        """End one from the queue while another runs: it does not wait."""
        self._in_hand.add(batch.id)
        self._begin(self._handle(batch))

    async def _expire(self) -> None:
        """End those whose time is over. One that is worked on has a timer, too, but clocks are set."""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            for batch in self._batches:
                self._end_in_time(batch)

    def _end_in_time(self, batch: StoredBatch) -> None:
        """End a batch if its time is over."""
        if batch.over or batch.expires_at > time.time():
            return
        if batch.id in self._runs:
            self._runs[batch.id].stop()
        elif batch.id not in self._in_hand:
            self._take(batch)

    async def _handle(self, batch: StoredBatch) -> bool:
        """Bring one batch to its end. False: the ranks are gone for good, and the next server goes on."""
        self._in_hand.add(batch.id)
        try:
            while not batch.over:
                try:
                    await self._do(batch)
                except ApiError as error:
                    link = self._engine.link
                    if error.status == 503 and (link.state == "failed" or link.draining):
                        return False
                    if error.status == FULL:
                        await self._wait_for_room(batch, error)
                    elif error.status != 503:  # after that others will come, which _do waits for
                        await self._give_up(batch, Mistake(error.code or "failed", error.message))
                except (NoRoom, OSError) as error:
                    await self._wait_for_room(batch, error)
                except Exception as error:  # one batch must not end the others
                    if not isinstance(error, FatalError):
                        log.exception("batch %s failed", batch.id)
                    await self._give_up(batch, Mistake("failed", str(error)))
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
        file = self.files.get(batch.input_file_id, batch.owner)
        input = self.files.path(file)
        await self._read_whole(self.files.check_whole, file)
        fresh = batch.status == "validating"
        batch.errors = []  # it waits for room no longer
        if fresh:
            batch.total, mistakes = await self._read_whole(validate, str(input), batch.endpoint)
            if mistakes:
                await self._give_up(batch, *mistakes)
                return
            await self._engine.link.wait_ready()
            batch.setup = await on_disk(setup, self._engine.config)
            if batch.status == "validating":  # and not cancelled meanwhile
                batch.enter("in_progress")
            await self._save(batch)
        count = partial(self._count, batch)
        room = partial(self._has_room, batch)
        told = count, self._ended, room
        run = StoredRun(input, self._path(batch, "journal"), self._engine, *told, batch.owner)
        self._runs[batch.id] = run
        left = max(0.0, batch.expires_at - time.time())
        timer = asyncio.get_running_loop().call_later(left, self._end_in_time, batch)
        try:
            if batch.status in ("in_progress", "finalizing"):  # the latter: a server ended while it wrote the files
                run.failure = "" if fresh else await self._changed(batch)
                if not run.failure:
                    await run.run()
                if not run.stopped and not run.failure and run.counts().done < batch.total:
                    raise self._engine.link.unavailable()
            await self._finish(batch, file.filename.removesuffix(".jsonl"), run)
        finally:
            timer.cancel()
            self._current(batch)
            del self._runs[batch.id]
            await to_its_end(run.close, remove=batch.over)  # a journal that stays open keeps its lock

    async def _changed(self, batch: StoredBatch) -> str:
        """The setting that has changed since the batch began and would change answers; "" if none has."""
        await self._engine.link.wait_ready()
        now = await on_disk(setup, self._engine.config)
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
            await self._save(batch)
        self.files.uncount(batch.id)  # the files take the place of the journal
        before = batch.status
        made = [self.files.new(f"{name}_{kind}.jsonl", "batch_output", batch.owner) for kind in ("output", "errors")]
        try:
            await self._write(batch, end, made, run)
        except BaseException:  # all of it is done again
            batch.status = before if batch.over else batch.status
            batch.output_file_id = batch.error_file_id = None
            for file in made:
                await on_disk(self.files.drop, file)
            raise

    async def _write(self, batch: StoredBatch, end: str, made: list[StoredFile], run: StoredRun) -> None:
        """The output file and the error file, of which an empty one is left out, and the batch as it ended."""
        answers, errors = (self.files.path(file) for file in made)
        count = await self._read_whole(run.finish, end, answers, errors)
        batch.given_up = batch.given_up or run.given_up
        batch.total = batch.total or count  # one that was cancelled in the queue was not counted before
        self._current(batch)
        batch.output_file_id, batch.error_file_id = await self._read_whole(self._keep, made)
        batch.enter(end)
        await self._save(batch)

    def _keep(self, made: list[StoredFile]) -> list[str | None]:
        """Have these files in the store, less the empty ones: their ids. In a thread."""
        kept: list[str | None] = []
        for file in made:
            path = self.files.path(file)
            if path.exists() and path.stat().st_size:
                self.files.add(file)
                kept.append(file.id)
            else:
                self.files.drop(file)
                kept.append(None)
        return kept

    async def _give_up(self, batch: StoredBatch, *why: Mistake) -> None:
        batch.errors = [one.body() for one in why]
        batch.enter("failed")
        try:
            await on_disk(self._path(batch, "journal").unlink, missing_ok=True)
            self.files.uncount(batch.id)
            await self._save(batch)
        except (ApiError, OSError) as error:
            log.error("batch %s: %s", batch.id, error)

    def _has_room(self, batch: StoredBatch, journal: int) -> bool:
        """Count the journal, and tell whether its owner may store as much again: for a time both it and the files that
        are made of it are there.
        """
        self.files.count(batch.id, batch.owner, journal)
        return self.files.left(batch.owner) > journal

    def _count(self, batch: StoredBatch, entry: Entry) -> None:
        self.done += 1
        self._used(batch.owner, entry.prompt_tokens, entry.output_tokens)


def _write_whole(path: str, content: bytes) -> None:
    with atomically(path) as out:
        out.write(content)
