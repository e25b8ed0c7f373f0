"""Shares of API keys in what the server keeps for them: no key's use takes away what another key needs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, Protocol, TypeVar


class Budget:
    """An amount of something that keys hold until they give it back, bounded for each key and in all.

    The quota of a key is its equal part of the total, and at least `floor`: with very many keys the total decides.
    Any thread may call.
    """

    def __init__(self, total: int, keys: int, floor: int):
        self.total = total
        self.quota = min(total, max(total // max(1, keys), floor))
        self._held: Counter[Hashable] = Counter()
        self._sum = 0
        self._lock = threading.Lock()

    def held(self, key: Hashable) -> int:
        return self._held[key]

    def left(self, key: Hashable) -> int:
        """How much more the key may take."""
        return min(self.quota - self._held[key], self.total - self._sum)

    def take(self, key: Hashable, amount: int) -> bool:
        """Hold so much more. False, and nothing taken, where that is too much."""
        with self._lock:
            if amount > self.left(key):
                return False
            self._add(key, amount)
            return True

    def force(self, key: Hashable, amount: int) -> None:
        """Count what is held already, such as files of an earlier server."""
        with self._lock:
            self._add(key, amount)

    def give(self, key: Hashable, amount: int) -> None:
        """Hold so much less."""
        with self._lock:
            self._add(key, -amount)

    def _add(self, key: Hashable, amount: int) -> None:
        self._held[key] += amount
        self._sum += amount


class Entry(Protocol):
    """The interface of a SharedStore's entries."""

    @property
    def key(self) -> Hashable: ...

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def running(self) -> bool:
        """Whether it is still made, so that it cannot be forgotten."""


Id = TypeVar("Id", bound=Hashable)
Kept = TypeVar("Kept", bound=Entry)


class _Held(Generic[Id]):
    """One key's entries with their sizes, the one that was put last at the end."""

    def __init__(self) -> None:
        self.sizes: dict[Id, int] = {}
        self.bytes = 0


class SharedStore(Generic[Id, Kept]):
    """Entries of API keys, bounded in number and bytes.

    What is too much is taken from the key that holds most, the entry that was put first of all. So a key that has no
    more than its equal part loses nothing to others, and may use what the others leave.
    """

    def __init__(self, most: int, most_bytes: int):
        self.most = most
        self.most_bytes = most_bytes
        self.bytes = 0
        self._entries: dict[Id, Kept] = {}
        self._held: dict[Hashable, _Held[Id]] = {}

    def get(self, id: Id) -> Kept | None:
        return self._entries.get(id)

    def __contains__(self, id: Id) -> bool:
        return id in self._entries

    def __iter__(self) -> Iterator[Kept]:
        """The entries, the one that was put first at the beginning; they may be forgotten meanwhile."""
        return iter(list(self._entries.values()))

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, id: Id, entry: Kept) -> list[Kept]:
        """Keep an entry as the newest one, or count what it has grown to. Then forget what is too much: returns it."""
        self.pop(id)
        self._entries[id] = entry
        held = self._held.setdefault(entry.key, _Held())
        held.sizes[id] = entry.size
        held.bytes += entry.size
        self.bytes += entry.size
        return self.trim()

    def pop(self, id: Id) -> Kept | None:
        """Forget an entry, if it is there."""
        entry = self._entries.pop(id, None)
        if entry is None:
            return None
        held = self._held[entry.key]
        size = held.sizes.pop(id)
        held.bytes -= size
        self.bytes -= size
        if not held.sizes:
            del self._held[entry.key]
        return entry

    def trim(self) -> list[Kept]:
        """Forget what is too much, and return it. What is running stays."""
        gone: list[Kept] = []
        while len(self._entries) > self.most and self._forget_one(lambda held: len(held.sizes), gone):
            pass
        while self.bytes > self.most_bytes and self._forget_one(lambda held: held.bytes, gone):
            pass
        return gone

    def _forget_one(self, measure: Callable[[_Held[Id]], int], gone: list[Kept]) -> bool:
        """Forget one entry of the key that has most; False where all are running."""
        for held in sorted(self._held.values(), key=measure, reverse=True):
            for id in held.sizes:
                if not self._entries[id].running:
                    gone.append(self._entries[id])
                    self.pop(id)
                    return True
        return False
