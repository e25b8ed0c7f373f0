"""The KV cache's blocks: who holds which, which still carry a reusable prefix, and what is thrown out first.

A block is in exactly one of three states:

* held: by one or more sequences (`references` > 0);
* cached: held by nobody, but its content is known by its hash and can be taken again;
* blank: held by nobody, content worthless.

A full block's hash covers its tokens and all before them (a hash chain), so equal hashes mean equal keys and values.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from ..protocol import pack_u32

Hash = bytes
SLICE = 1000  # blocks that `audit` looks at in one go: a third of a millisecond
BROKEN = "block accounting is broken"


def chain(parent: Hash, tokens: Iterable[int]) -> Hash:
    """The hash of a full block of `tokens` that follows the block (or salt) hashed as `parent`."""
    return hashlib.blake2b(parent + pack_u32(tokens), digest_size=16).digest()


def root(salt: str) -> Hash:
    """Where a chain starts; sequences with different salts share nothing."""
    return hashlib.blake2b(salt.encode(), digest_size=16).digest()


def extend_chain(hashes: list[Hash], tokens: Sequence[int], size: int, salt: str) -> None:
    """Add the hashes of the full blocks of `tokens` that `hashes` does not have yet."""
    for i in range(len(hashes), len(tokens) // size):
        hashes.append(chain(hashes[-1] if hashes else root(salt), tokens[i * size : (i + 1) * size]))


class Blocks:
    def __init__(self, count: int, size: int, prefix_cache: bool = True):
        self.count = count
        self.size = size
        self.prefix_cache = prefix_cache
        self._blank = list(range(count - 1, -1, -1))  # a stack: low numbers first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._references = [0] * count
        self._hash_of: list[Hash | None] = [None] * count
        self._by_hash: dict[Hash, int] = {}

    @property
    def free(self) -> int:
        """Blocks that can be taken: blank or cached."""
        return len(self._blank) + len(self._cached)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def used(self) -> int:
        return self.count - self.free

    def take(self, count: int) -> list[int]:
        """`count` blocks for one holder, blank ones first, then the least recently used cached ones.

        Raises ValueError when fewer than `count` are free; nothing is taken then.
        """
        if count > self.free:
            raise ValueError(f"{count} blocks wanted, {self.free} are free")
        taken = []
        for _ in range(count):
            if self._blank:
                block = self._blank.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
            self._references[block] = 1
            taken.append(block)
        return taken

    def match(self, hashes: Sequence[Hash]) -> list[int]:
        """The blocks of the longest known prefix of a chain; not held yet."""
        found = []
        for digest in hashes:
            block = self._by_hash.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def hold(self, blocks: Iterable[int]) -> None:
        """One more holder for each of these matched blocks."""
        for block in blocks:
            if not self._references[block]:
                del self._cached[block]
            self._references[block] += 1

    def unheld(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are free now, so that holding them lowers `free`."""
        return sum(not self._references[block] for block in blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """One holder fewer for each. The end of a sequence is thrown out before its beginning, which more can share."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._hash_of[block] is None:
                self._blank.append(block)
            else:
                self._cached[block] = None

    def publish(self, block: int, digest: Hash) -> None:
        """Make a held, full block findable. Of two blocks with equal content the first stays the known one."""
        if self.prefix_cache and self._hash_of[block] is None and digest not in self._by_hash:
            self._hash_of[block] = digest
            self._by_hash[digest] = block

    def _forget(self, block: int) -> None:
        digest = self._hash_of[block]
        if digest is not None:
            del self._by_hash[digest]
            self._hash_of[block] = None

    def check_empty(self) -> None:
        """Raise RuntimeError unless the counts are those of a pool that nobody holds a block of; in constant time."""
        if self.free != self.count:
            raise RuntimeError(f"{BROKEN}: {self.free} of {self.count} blocks are free, and nobody holds one")
        if len(self._by_hash) != self.cached:
            raise RuntimeError(f"{BROKEN}: {len(self._by_hash)} hashes are known of {self.cached} cached blocks")

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Raise RuntimeError unless every block is accounted for, given all sequences' block lists."""
        for _ in self.audit(holders):
            pass

    def audit(self, holders: Iterable[Sequence[int]]) -> Iterator[None]:
        """`check`, a SLICE of blocks at a time. Blocks must not change hands before its end; it may be dropped."""
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
        """Of the blocks from `start` on, which have so many holders, how many have a hash.

        blank: 1 for each block of the pool that is on that stack.
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
