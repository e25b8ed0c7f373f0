"""Which blocks of the prefix cache lie in host memory: those that fell out of the device's pool, newest first kept.

A block that the pool evicts is copied out; a sequence that finds it again, a preempted one too, gets it copied back
into a new block. Its copy stays, so that it costs nothing to evict it again. Where everything here is newer, or being
read, an evicted block is forgotten as if there were no host memory.

A plan's copies out happen before its copies in, and both before its step (rank/worker/swap.py). So a host block that
the plan reads is not written by it.
"""

from __future__ import annotations

from collections import OrderedDict

from ..protocol import pack_u32

Hash = bytes  # of a block's tokens and all before them


class HostTier:
    """The host blocks of one replica, the same on each of its ranks. All methods take constant time a block."""

    def __init__(self, count: int, least: int = 1):
        """count: host blocks. least: as many blocks in one go are copied back sooner than computed again."""
        self.count, self.least = count, least
        self._free = list(range(count - 1, -1, -1))
        self._by_hash: OrderedDict[Hash, int] = OrderedDict()  # least recently used first
        # Of the plan that is being written: the block that is copied to each host block. A tier smaller than what one
        # plan evicts gives a host block more than once, and the last copy alone counts: they have no order.
        self._out: dict[int, int] = {}
        self._in: list[int] = []  # host and device block in turn
        self._read: set[int] = set()  # host blocks that it reads
        self.stored = 0  # blocks copied out since the start
        self.loaded = 0  # blocks copied back

    def __contains__(self, digest: Hash) -> bool:
        return digest in self._by_hash

    @property
    def num_used(self) -> int:
        return len(self._by_hash)

    def store(self, block: int, digest: Hash) -> None:
        """Keep a block that the pool evicts, unless it is here already or all host blocks are being read."""
        if digest in self._by_hash:
            self._by_hash.move_to_end(digest)
            return
        host = self._free.pop() if self._free else self._evict()
        if host >= 0:
            self._by_hash[digest] = host
            self.stored += host not in self._out
            self._out[host] = block

    def _evict(self) -> int:
        """The least recently used host block, or -1 where the plan reads all that there are."""
        for digest, host in self._by_hash.items():
            if host not in self._read:
                del self._by_hash[digest]
                return host
        return -1

    def pin(self, digest: Hash) -> None:
        """Keep a block that the plan is going to load."""
        self._read.add(self._by_hash[digest])
        self._by_hash.move_to_end(digest)

    def load(self, digest: Hash, block: int) -> None:
        """Copy a pinned block back into `block` of the pool."""
        self._in += self._by_hash[digest], block
        self.loaded += 1

    def take_copies(self) -> tuple[bytes, bytes]:
        """The plan's copies out and in, as protocol.Plan has them."""
        out = [number for host, block in self._out.items() for number in (block, host)]
        copies = pack_u32(out), pack_u32(self._in)
        self._out, self._in = {}, []
        self._read.clear()
        return copies

    def check(self) -> None:
        """Raise RuntimeError unless as many host blocks are free or have a hash as there are. Takes constant time."""
        if (known := len(self._free) + self.num_used) != self.count:
            raise RuntimeError(f"host block accounting is broken: {known} of {self.count} are free or have a hash")

    def stats(self) -> dict[str, int]:
        """Of protocol.Stats."""
        return {
            "host_blocks_total": self.count,
            "host_blocks_used": self.num_used,
            "host_stores": self.stored,
            "host_loads": self.loaded,
        }
