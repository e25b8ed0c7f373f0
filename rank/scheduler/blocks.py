"""The KV cache's block pool: reference counts, the prefix cache and its eviction order.

A block is in exactly one of three states:

* held: by one or more sequences (`references` > 0);
* cached: held by no sequence, but found by its hash, so a later sequence can reuse it;
* blank: held by no sequence, content worthless.

With a host tier, a cached block that is evicted may still be found there (host_tier.py). Where layers keep states of
whole sequences, blocks are of use as far as there is a snapshot of these (snapshots.py).

A full block's hash covers its tokens and all before them (a hash chain), so equal hashes mean equal keys and values.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from ..protocol import pack_u32
from .host_tier import HostTier
from .places import Hash
from .snapshots import Snapshots

SLICE = 1000  # blocks that `audit` checks in one go, so that no step waits for long
BROKEN = "block accounting is broken"
IN_HOST = -1  # among the blocks of a prefix: one that host memory has


def chain(parent: Hash, packed: bytes) -> Hash:
    """The hash of a full block of tokens, as pack_u32 has them, that follows the block (or salt) hashed as `parent`."""
    return hashlib.blake2b(parent + packed, digest_size=16).digest()


def root(salt: str) -> Hash:
    """The start of a hash chain. Sequences with different salts share no blocks."""
    return hashlib.blake2b(salt.encode(), digest_size=16).digest()


def extend_chain(hashes: list[Hash], tokens: Sequence[int], size: int, salt: str) -> None:
    """Append the hashes of the full blocks of `tokens` that are not in `hashes` yet."""
    packed = pack_u32(tokens[len(hashes) * size : len(tokens) // size * size])
    parent = hashes[-1] if hashes else root(salt)
    for at in range(0, len(packed), 4 * size):
        parent = chain(parent, packed[at : at + 4 * size])
        hashes.append(parent)


class Blocks:
    """One replica's block pool. All methods but the checks take constant time a block."""

    def __init__(
        self,
        count: int,
        size: int,
        prefix_cache: bool = True,
        tier: HostTier | None = None,
        snapshots: Snapshots | None = None,
    ):
        """Raises ValueError for snapshots without a prefix cache: they are found by the hashes of its blocks."""
        if snapshots is not None and snapshots.count and not prefix_cache:
            raise ValueError(f"{snapshots.count} state snapshots, but no prefix cache")
        self.count = count
        self.tier = tier or HostTier(0)
        self.snapshots = snapshots or Snapshots()
        self.size = size
        self.prefix_cache = prefix_cache
        self._blank = list(range(count - 1, -1, -1))  # a stack: low numbers first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._references = [0] * count
        self._hash_of: list[Hash | None] = [None] * count
        self._by_hash: dict[Hash, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: blank or cached."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.count - self.num_free

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks for one sequence: blank ones first, then the least recently used cached ones.

        Raises ValueError where fewer than `count` are free, and allocates none.
        """
        if count > self.num_free:
            raise ValueError(f"{count} blocks wanted, {self.num_free} are free")
        taken = []
        for _ in range(count):
            if self._blank:
                block = self._blank.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._evict(block)
            self._references[block] = 1
            taken.append(block)
        return taken

    def match(self, hashes: Sequence[Hash]) -> list[int]:
        """The blocks of the longest cached prefix of a hash chain. They are not held yet: call `hold`.

        IN_HOST stands for those that only host memory has, where enough of them are there to be worth a copy.
        """
        found = []
        for digest in hashes:
            block = self._by_hash.get(digest, IN_HOST)
            if block == IN_HOST and digest not in self.tier:
                break
            found.append(block)
        if 0 < found.count(IN_HOST) < self.tier.least:
            del found[found.index(IN_HOST) :]
        return found

    def hold(self, found: Sequence[int], hashes: Sequence[Hash]) -> list[int]:
        """Add a reference to each matched block, and have those in host memory copied into new ones; all of them.

        hashes: the chain that was matched. As many blocks as `num_unreferenced` says must be free.
        """
        for block, digest in zip(found, hashes, strict=False):
            if block == IN_HOST:
                self.tier.pin(digest)  # before anything is evicted to make room
            else:
                self.incref([block])
        held = []
        for block, digest in zip(found, hashes, strict=False):
            if block == IN_HOST:
                (block,) = self.allocate(1)
                self.tier.load(digest, block)
                self.cache(block, digest)
            held.append(block)
        return held

    def incref(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of these matched blocks."""
        for block in blocks:
            if not self._references[block]:
                del self._cached[block]
            self._references[block] += 1

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of these matched blocks no sequence holds, so that `hold` would lower `num_free`."""
        return sum(block == IN_HOST or not self._references[block] for block in blocks)

    def free(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each block. The last ones are evicted first, as more prompts share the first ones."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._hash_of[block] is None:
                self._blank.append(block)
            else:
                self._cached[block] = None

    def cache(self, block: int, digest: Hash) -> None:
        """Enter a held, full block into the prefix cache.

        Of two with equal content only the first is entered, unless nobody holds it: then it was of no use, for lack of
        a state snapshot, and the second one will stay longer.
        """
        if not self.prefix_cache or self._hash_of[block] is not None:
            return
        known = self._by_hash.get(digest)
        if known is not None:
            if self._references[known]:
                return
            del self._cached[known]
            self._hash_of[known] = None
            self._blank.append(known)
        self._hash_of[block] = digest
        self._by_hash[digest] = block

    def _evict(self, block: int) -> None:
        digest = self._hash_of[block]
        if digest is not None:
            self.tier.store(block, digest)
            self.snapshots.drop(digest)
            del self._by_hash[digest]
            self._hash_of[block] = None

    def check_empty(self) -> None:
        """Raise RuntimeError unless the counts are those of a pool without held blocks. Takes constant time."""
        if self.num_free != self.count:
            raise RuntimeError(f"{BROKEN}: {self.num_free} of {self.count} blocks are free, and nobody holds one")
        if len(self._by_hash) != self.num_cached:
            raise RuntimeError(f"{BROKEN}: {len(self._by_hash)} hashes are known of {self.num_cached} cached blocks")
        self.tier.check()
        self.snapshots.check()

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Raise RuntimeError unless all blocks are accounted for. holders: every sequence's block list."""
        for _ in self.audit(holders):
            pass

    def audit(self, holders: Iterable[Sequence[int]]) -> Iterator[None]:
        """`check` in steps, a SLICE of blocks each. The pool must not change before its end; it may be dropped."""
        expected = [0] * self.count
        for blocks in holders:
            for block in blocks:
                expected[block] += 1
        blank = bytearray(self.count)
        for start in range(0, len(self._blank), SLICE):
            for block in self._blank[start : start + SLICE]:
                if blank[block]:
                    raise RuntimeError(f"{BROKEN}: block {block} is free twice")
                blank[block] = 1
            yield
        known = 0
        for start in range(0, self.count, SLICE):
            known += self._audit(start, expected[start : start + SLICE], blank)
            yield
        if len(self._by_hash) != known:
            raise RuntimeError(f"{BROKEN}: {len(self._by_hash)} hashes are known, {known} blocks have one")

    def _audit(self, start: int, expected: list[int], blank: bytearray) -> int:
        """Check a slice of blocks. Returns how many of them have a hash.

        expected: references of each block from `start` on. blank: 1 for each block of the pool on the blank stack.
        """
        stop = start + len(expected)
        if expected != self._references[start:stop]:
            wrong = [start + i for i, n in enumerate(expected) if n != self._references[start + i]]
            raise RuntimeError(f"{BROKEN}: holders of blocks {wrong[:8]} do not add up")
        digests = self._hash_of[start:stop]
        for block, holders, digest in zip(range(start, stop), expected, digests, strict=True):
            cached = block in self._cached
            if blank[block] + cached != (not holders):
                found = f"held by {holders}, blank {blank[block]} times, cached {int(cached)} times"
                raise RuntimeError(f"{BROKEN}: block {block} is {found}; it is either held or free, once")
            if (self._by_hash.get(digest) != block or blank[block]) if digest is not None else cached:
                raise RuntimeError(f"{BROKEN}: the hash of block {block} does not lead to it")
        return len(digests) - digests.count(None)
