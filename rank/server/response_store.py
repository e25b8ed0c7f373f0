"""Responses that are kept in memory, so that clients can ask for them again and go on from them.

What is kept is JSON: the objects that it decodes to take up to fifty times the memory. A body is kept once, however
often it stands in events.
"""

from __future__ import annotations

import asyncio
import logging
import os
import zlib
from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from .api_error import ApiError
from .blocking import on_disk
from .kept_files import KeptFiles
from .renderer import Event, encoded
from .shares import Budget, SharedStore

log = logging.getLogger(__name__)
MAX_BYTES = 256 << 20  # of all that is kept and of what is made in the background
FLOOR_BYTES = 64 << 20  # that each key's responses in the background may have, however many keys there are
FLOOR = 16  # responses in the background at a time for each key
PREFIX = "resp_"  # of ids
BLOCK = 1 << 14  # bytes of events that are compressed together
LONG = 256  # bytes of a field from which on it is kept as JSON
OBJECTS = 2048  # bytes of a response's own objects


class EventLog:
    """The events of a response in their order. Deltas are hardly more than their names, so they are kept compressed."""

    def __init__(self) -> None:
        self.count = 0
        self.size = 0  # bytes in memory
        self._blocks: list[bytes | Event] = []  # compressed events, or one whose body is kept elsewhere
        self._starts: list[int] = []  # the number of each block's first event
        self._open: list[bytes] = []  # events that are not in a block yet
        self._open_size = 0

    def add(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, bytes):
                self._open.append(event)
                self._open_size += len(event)
                self.size += len(event)
            else:
                self.seal()
                self._append(event, self.count)
            self.count += 1
            if self._open_size >= BLOCK:
                self.seal()

    def seal(self) -> None:
        """Compress what is open."""
        if self._open:
            block = zlib.compress(msgspec.msgpack.encode(self._open), 1)
            self._append(block, self.count - len(self._open))
            self.size += len(block) - self._open_size
            self._open, self._open_size = [], 0

    def _append(self, block: bytes | Event, start: int) -> None:
        self._blocks.append(block)
        self._starts.append(start)

    def read(self, first: int) -> tuple[list[Event], int]:
        """Some events from this number on, none where there are no more yet, and the number to read on from."""
        opened = self.count - len(self._open)
        if first >= opened:
            return [*self._open[first - opened :]], max(first, self.count)
        i = bisect_right(self._starts, first) - 1
        start, block = self._starts[i], self._blocks[i]
        if not isinstance(block, bytes):
            return [block], first + 1
        events = msgspec.msgpack.decode(zlib.decompress(block), type=list[bytes])
        return [*events[first - start :]], start + len(events)


class Kept:
    """One response. It goes on from `previous`, and only the API key that it came with may see it."""

    def __init__(self, previous: Kept | None, input: list[dict[str, Any]], key: int):
        self.body: dict[str, Any] = {}  # what is long in it is JSON
        self.input: bytes = msgspec.json.encode(input)
        # Lists of items as JSON, in their order. They are counted though `previous` may hold them too: they live on
        # when that is forgotten.
        self.before: tuple[bytes, ...] = ()
        if previous is not None:
            self.before = (*previous.before, previous.input, bytes(previous.body["output"]))
        self.key = key
        self.log = EventLog()  # of one in the background
        self.task: asyncio.Task[None] | None = None  # that makes it, in the background
        self._asked_size = OBJECTS + sum(map(len, self.before)) + len(self.input)
        self._body_size = 0
        self.more = 0  # bytes that are held beside, while it is made
        self.elsewhere = False  # another job is making it
        self._changed = asyncio.Event()

    @property
    def size(self) -> int:
        """Bytes in memory."""
        return self._asked_size + self._body_size + self.log.size + self.more

    def show(self, body: dict[str, Any]) -> None:
        """The response as it is now."""
        self.body = body
        self._body_size = sum(memoryview(one).nbytes for one in body.values() if isinstance(one, msgspec.Raw))

    def restore(self, input: bytes, before: tuple[bytes, ...], body: dict[str, Any]) -> None:
        """Become a response that was kept in a file."""
        self.input, self.before = input, before
        self._asked_size = OBJECTS + sum(map(len, before)) + len(input)
        self.show(body)

    def asked(self) -> list[dict[str, Any]]:
        """The items that it was asked with, after those before them."""
        return [item for part in (*self.before, self.input) for item in msgspec.json.decode(part)]

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """Everything up to its end, as items."""
        return [*self.asked(), *msgspec.json.decode(self.body["output"])]

    @property
    def running(self) -> bool:
        return self.task is not None and not self.task.done()

    def add(self, events: list[Event]) -> None:
        self.log.add(events)
        self._wake()

    def end(self, body: dict[str, Any]) -> None:
        """The response is as it stays."""
        self.show(body)
        self.task, self.more = None, 0
        self.log.seal()
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(self, first: int) -> AsyncIterator[bytes]:
        """Its events from this number on, to the end."""
        while True:
            changed = self._changed
            events, first = self.log.read(first)
            if events:
                yield b"".join(map(encoded, events))
            elif not self.running:
                return
            else:
                await changed.wait()


class StoredResponse(msgspec.Struct, array_like=True):
    """A response in a file, for the next job of a service."""

    body: bytes  # JSON
    input: bytes
    before: list[bytes]
    maker: str = ""  # the registry's file of the job that is making it; "": it is made


def _short(value: msgspec.Raw, name: str) -> Any:
    """A field of a body as `Kept.body` has it: what is long stays JSON."""
    return value.copy() if name == "output" or len(bytes(value)) > LONG else msgspec.json.decode(value)


class ResponseStore:
    """At most `most` responses, of which the oldest of the key that has most go first. Those that are still made stay:
    each key may have as many of them, and as many bytes, as is its share.
    """

    def __init__(self, most: int, keys: int = 1, owners: Sequence[str] = ("",)):
        self.most = most
        self.files: KeptFiles | None = None  # that the job's successors share
        self.maker = ""  # this job's file in the registry
        self._owners = owners
        self._kept: SharedStore[str, Kept] = SharedStore(most, MAX_BYTES)
        self._running = Budget(most, keys, FLOOR)
        self._running_bytes = Budget(MAX_BYTES, keys, FLOOR_BYTES)
        self._counted: dict[str, int] = {}  # bytes that the budget knows of, by the ids of those that are made

    def get(self, id: str, key: int, param: str | None = None) -> Kept:
        """Raises ApiError 404, also for what came with another API key."""
        kept = self._kept.get(id)
        if kept is None or kept.key != key:
            why = f"the last {self.most} are kept" if self.most else "none is kept (--response-store 0)"
            raise ApiError(404, f"there is no response {id[:100]!r} here: {why}", param, "response_not_found")
        return kept

    async def find(self, id: str, key: int, param: str | None = None) -> Kept:
        """Finds like `get`, and also in the files that an earlier job has written."""
        kept = self._kept.get(id)
        if self.files is not None and (kept is None or kept.elsewhere) and id.startswith(PREFIX):
            found = await self.files.get(self._owners[key], id, wait=kept is None)
            if found is not None:
                try:
                    self._kept.put(id, await on_disk(self._read, found[0], key))
                except msgspec.DecodeError as error:
                    log.error("the file of response %s is damaged: %s", id[:100], error)
        return self.get(id, key, param)

    async def saved(self, id: str, key: int) -> None:
        """Wait until a response is in its file, if there are files; see KeptFiles.saved."""
        if self.files is not None:
            await self.files.saved(self._owners[key], id)

    def _read(self, content: bytes, key: int) -> Kept:
        stored = msgspec.msgpack.decode(content, type=StoredResponse)
        kept = Kept(None, [], key)
        body = msgspec.json.decode(stored.body, type=dict[str, msgspec.Raw])
        shown = {name: _short(value, name) for name, value in body.items()}
        kept.elsewhere = bool(stored.maker)
        if kept.elsewhere and not os.path.exists(stored.maker):
            kept.elsewhere = False
            error = {"code": "server_error", "message": "the job that made it has ended; send the request again"}
            shown |= {"status": "failed", "error": error}
        kept.restore(stored.input, tuple(stored.before), shown)
        return kept

    def _save(self, id: str, kept: Kept, maker: str = "") -> None:
        if self.files is not None:
            stored = StoredResponse(msgspec.json.encode(kept.body), kept.input, list(kept.before), maker)
            self.files.put(self._owners[kept.key], id, msgspec.msgpack.encode(stored))

    def put(self, id: str, kept: Kept) -> None:
        self._kept.put(id, kept)
        self._save(id, kept)

    def begin(self, id: str, kept: Kept) -> None:
        """Keep one that is about to be made in the background, until `finish`. Raises ApiError 429."""
        key, size = kept.key, kept.size
        if not self._running.take(key, 1):
            raise _busy(f"{self._running.held(key)} of this API key are made already")
        if not self._running_bytes.take(key, size):
            self._running.give(key, 1)
            raise _busy(f"it has {size} bytes, and of its share this API key has {self._running_bytes.left(key)} left")
        self._counted[id] = size
        self._kept.put(id, kept)
        self._save(id, kept, self.maker)

    def grow(self, id: str, kept: Kept) -> bool:
        """Count what one in the background has grown to. False where there is no room for it."""
        more = kept.size - self._counted[id]
        if more < BLOCK:
            return True
        if not self._running_bytes.take(kept.key, more):
            return False
        self._counted[id] += more
        if id in self._kept:  # not removed meanwhile
            self._kept.put(id, kept)
        return True

    def hold(self, id: str, kept: Kept, size: int) -> bool:
        """Count further bytes that are held until the response is made. False where there is no room for them."""
        if not self._running_bytes.take(kept.key, size):
            return False
        kept.more += size
        self._counted[id] += size
        return True

    def finish(self, id: str, kept: Kept) -> None:
        """It is made, and one of those that are kept."""
        self._running.give(kept.key, 1)
        self._running_bytes.give(kept.key, self._counted.pop(id))
        if id in self._kept:
            self.put(id, kept)

    def remove(self, id: str, key: int) -> None:
        kept = self.get(id, key)
        self._kept.pop(id)
        if self.files is not None:
            self.files.drop(self._owners[key], id)
        if kept.task is not None:
            kept.task.cancel()


def _busy(why: str) -> ApiError:
    return ApiError(
        429, f"no more responses in the background for now: {why}; wait for one", code="busy", retry_after=5
    )
