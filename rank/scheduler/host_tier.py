"""Which blocks of the prefix cache lie in host memory: those that fell out of the device's pool, newest first kept.

A block that the pool evicts is copied out; a sequence that finds it again, a preempted one too, gets it copied back
into a new block. Its copy stays, so that it costs nothing to evict it again. Where everything here is newer, or being
read, an evicted block is forgotten as if there were no host memory.

A plan's copies out happen before its copies in, and both before its step (rank/worker/swap.py). So a host block that
the plan reads is not written by it.
"""

from __future__ import annotations

from ..protocol import pack_u32
from .lru_slots import Hash, LruSlots


class HostTier:
    """The host blocks of one replica, the same on each of its ranks. All methods take constant time a block."""

    def __init__(self, count: int, least: int = 1, most: int = 1 << 30):
        """count: host blocks. least: as many blocks in one go are copied back sooner than computed again. most: once a
        plan copies as many back, the next sequence that needs some waits for the next plan, as all of a step's
        sequences wait for its copies."""
        self.count, self.least, self.most = count, least, most
        self.slots = LruSlots(count)
        # The block copied to each host block by the plan that is being written. A tier smaller than what one
        # plan evicts gives a host block more than once, and the last copy alone counts: they have no order.
        self._out: dict[int, int] = {}
        self._in: list[int] = []  # host and device block in turn
        self._read: set[int] = set()  # host blocks that it reads
        self.stored = 0  # blocks copied out since the start
        self.loaded = 0  # blocks copied back

    def __contains__(self, digest: Hash) -> bool:
        return digest in self.slots

    @property
    def num_used(self) -> int:
        return len(self.slots)

    @property
    def busy(self) -> bool:
        """Whether the plan copies back as many blocks as it should."""
        return len(self._in) // 2 >= self.most

    def store(self, block: int, digest: Hash) -> None:
        """Keep a block that the pool evicts, unless it is here already or all host blocks are being read."""
        if digest in self.slots:
            self.slots.move_to_end(digest)
        elif (host := self.slots.take(kept=self._read)) >= 0:
            self.slots[digest] = host
            self.stored += host not in self._out
            self._out[host] = block

    def pin(self, digest: Hash) -> None:
        """Keep a block that the plan is going to load."""
        self._read.add(self.slots[digest])
        self.slots.move_to_end(digest)

    def load(self, digest: Hash, block: int) -> None:
        """Copy a pinned block back into `block` of the pool."""
        self._in += self.slots[digest], block
        self.loaded += 1

    def take_copies(self) -> tuple[bytes, bytes]:
        """The plan's copies out and in, as protocol.Plan has them."""
        out = [number for host, block in self._out.items() for number in (block, host)]
        copies = pack_u32(out), pack_u32(self._in)
        self._out, self._in = {}, []
        self._read.clear()
        return copies

    def check(self) -> None:
        """Raise RuntimeError unless each host block is free or a prefix's."""
        self.slots.check("host block")

    def stats(self) -> dict[str, int]:
        """Counters for protocol.Stats."""
        return {
            "host_blocks_total": self.count,
            "host_blocks_used": self.num_used,
            "host_stores": self.stored,
            "host_loads": self.loaded,
        }
