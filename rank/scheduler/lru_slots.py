"""Numbered slots that keep something of prefixes: host memory their blocks, snapshots the states behind them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

Hash = bytes  # of a block's tokens and all before them


class LruSlots(OrderedDict[Hash, int]):
    """Slots by prefix, least recently used first. The others of so many slots are free, or taken."""

    def __init__(self, count: int):
        super().__init__()
        self.count = count
        self.free = list(range(count - 1, -1, -1))

    def take(self, kept: Container[int] = ()) -> int:
        """A free slot, or the least recently used one that is not kept, whose prefix loses it; -1: there is none."""
        if self.free:
            return self.free.pop()
        digest = next((digest for digest, slot in self.items() if slot not in kept), None)
        return -1 if digest is None else self.pop(digest)

    def drop(self, digest: Hash) -> None:
        """A prefix's slot, if it has one, becomes free."""
        if digest in self:
            self.free.append(self.pop(digest))

    def check(self, what: str, taken: int = 0) -> None:
        """Raise RuntimeError unless each slot is free, a prefix's or one of so many taken ones."""
        if (known := len(self.free) + len(self) + taken) != self.count:
            raise RuntimeError(f"{what} accounting is broken: {known} of {self.count} are free or a prefix's")
