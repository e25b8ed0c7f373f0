"""Responses that are kept in memory, so that clients can ask for them again and go on from them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from .api_error import ApiError

MAX_BYTES = 256 << 20  # of all that is kept, as JSON


class Kept:
    """One response. It goes on from `previous`, and only the API key that it came with may see it."""

    def __init__(self, previous: Kept | None, input: list[dict[str, Any]], key: int):
        self.body: dict[str, Any] = {}
        self.before = previous.conversation if previous else []
        self.input = input
        self.key = key
        # Bytes. What came before is counted though `previous` may hold it too: it lives on when that is forgotten.
        self._items: int = (previous._items if previous else 0) + len(msgspec.json.encode(input))
        self.size = self._items
        self.events: list[bytes] = []  # of one in the background
        self.task: asyncio.Task[None] | None = None  # that makes it, in the background
        self._changed = asyncio.Event()

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """Everything up to its end, as items."""
        return [*self.before, *self.input, *self.body["output"]]

    @property
    def running(self) -> bool:
        return self.task is not None and not self.task.done()

    def add(self, events: list[bytes]) -> None:
        self.events += events
        self._wake()

    def end(self, body: dict[str, Any]) -> None:
        """The response is as it stays."""
        self.body = body
        self.task = None
        self._items += len(msgspec.json.encode(body["output"]))
        self.size = self._items + len(msgspec.json.encode(body)) + sum(map(len, self.events))
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(self, first: int) -> AsyncIterator[bytes]:
        """Its events from this number on, to the end."""
        while True:
            events, changed = self.events[first:], self._changed
            first += len(events)
            if events:
                yield b"".join(events)
            elif not self.running:
                return
            else:
                await changed.wait()


class ResponseStore:
    """At most `most` responses, of which the oldest go first. Those that are still made stay."""

    def __init__(self, most: int):
        self.most = most
        self._kept: dict[str, Kept] = {}

    def get(self, id: str, key: int, param: str | None = None) -> Kept:
        """Raises ApiError 404, also for what came with another API key."""
        kept = self._kept.get(id)
        if kept is None or kept.key != key:
            why = f"the last {self.most} are kept" if self.most else "none is kept (--response-store 0)"
            raise ApiError(404, f"there is no response {id[:100]!r} here: {why}", param, "response_not_found")
        return kept

    def put(self, id: str, kept: Kept) -> None:
        self._kept[id] = kept
        self.trim()

    def remove(self, id: str, key: int) -> None:
        kept = self.get(id, key)
        del self._kept[id]
        if kept.task is not None:
            kept.task.cancel()

    def trim(self) -> None:
        """Forget what is too much."""
        size = sum(kept.size for kept in self._kept.values())
        for id, kept in list(self._kept.items()):
            if len(self._kept) <= self.most and size <= MAX_BYTES:
                return
            if not kept.running:
                size -= kept.size
                del self._kept[id]
