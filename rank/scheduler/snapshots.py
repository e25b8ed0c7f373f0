"""State snapshots: what makes cached blocks of use to layers that keep a state of a whole sequence.

A prefix's blocks are worth nothing to such layers without the state behind the last of them. So the ranks copy a
sequence's states at some block borders, and a prompt may begin with cached blocks up to a border that has a snapshot. A
snapshot takes as much memory as thousands of tokens of the cache, so a sequence leaves few: before the last tokens of
its prompt, where the next turn of a conversation goes on; where it parts from what was computed before, as prompts do
that have a system prompt in common; and, where it goes on after a preemption, before its last tokens.

As for the cache's blocks, all is decided here, and a plan lists the copies. Those to rows are made before the plan's
step and those from rows after it. So a snapshot may be read by the plan that overwrites it, and is found from the next
plan on.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..protocol import pack_u32
from .lru_slots import Hash, LruSlots

LEAST = 2  # blocks between two snapshots of a prompt: a border costs a step of its own


class Snapshots:
    """The snapshots of one replica, the same on each of its ranks. All methods take constant time a block."""

    def __init__(self, count: int = 0):
        """count: for how many there is room. 0: no layer keeps a state, and prefixes need none."""
        self.count = count
        self.slots = LruSlots(count)
        # Entries of the plan that is being written:
        self._new: dict[Hash, int] = {}
        self._saves: list[int] = []  # row and snapshot in turn
        self._loads: list[int] = []  # snapshot and row in turn
        self.saved = 0
        self.loaded = 0

    @property
    def num_used(self) -> int:
        return len(self.slots) + len(self._new)

    def trim(self, hits: int, hashes: Sequence[Hash]) -> int:
        """How many of so many matched hashes are before the last border that has a snapshot."""
        while self.count and hits and hashes[hits - 1] not in self.slots:
            hits -= 1
        return hits

    def borders(self, hits: int, *ends: int) -> list[int]:
        """After how many blocks a sequence leaves a snapshot, which has `hits` when it begins. ends: those where it is
        worth one."""
        found: list[int] = []
        for border in sorted(ends) if self.count else ():
            if border >= hits + LEAST:
                found.append(border)
                hits = border
        return found

    def load(self, digest: Hash, row: int) -> None:
        """Copy the snapshot behind this prefix to a row. It is there, as `trim` found it for the same plan."""
        if self.count:
            self._loads += self.slots[digest], row
            self.slots.move_to_end(digest)
            self.loaded += 1

    def save(self, row: int, digest: Hash) -> None:
        """Keep a row's states after the plan's step as those behind this prefix, unless there is a snapshot of them."""
        if digest in self.slots:
            self.slots.move_to_end(digest)
        elif digest not in self._new and (slot := self.slots.take()) >= 0:
            self._new[digest] = slot
            self._saves += row, slot
            self.saved += 1

    def drop(self, digest: Hash) -> None:
        """The prefix's last block is evicted."""
        self.slots.drop(digest)

    def take_copies(self) -> tuple[bytes, bytes]:
        """The plan's copies to rows and from rows, as protocol.Plan has them."""
        copies = pack_u32(self._loads), pack_u32(self._saves)
        self._loads, self._saves = [], []
        self.slots.update(self._new)
        self._new = {}
        return copies

    def check(self) -> None:
        """Raise RuntimeError unless each slot is free or a prefix's."""
        self.slots.check("snapshot", len(self._new))

    def stats(self) -> dict[str, int]:
        """Counters for protocol.Stats."""
        return {
            "snapshots_total": self.count,
            "snapshots_used": self.num_used,
            "snapshot_saves": self.saved,
            "snapshot_loads": self.loaded,
        }
