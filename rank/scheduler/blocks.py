"""The KV cache's block pool: reference counts, the prefix cache and its eviction order, and sequences' block tables.

A block is in exactly one of three states:

* held: by one or more sequences (`references` > 0);
* cached: held by no sequence, but found by its hash, so a later sequence can reuse it;
* blank: held by no sequence, content worthless.

With a host tier, a cached block that is evicted may still be found there (host_tier.py). Where layers keep states of
whole sequences, blocks are of use as far as there is a snapshot of these (snapshots.py).

A full block's hash covers its tokens and all before them (a hash chain), so equal hashes mean equal keys and values.

A sequence has a block table for each cache group (rank/cache_groups.py). A block of a group is found by the hash of its
tokens and the group. Blocks behind a group's window are freed, and stay in the prefix cache as others do: a prefix is a
hit where groups without a window have all of its blocks, and those with one have the blocks that the next token reads.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from .. import cache_groups
from ..cache_groups import ONE_GROUP, CacheGroup, Groups
from ..protocol import Picture, pack_u32
from .host_tier import HostTier
from .lru_slots import Hash
from .snapshots import Snapshots

SLICE = 1000  # blocks that `audit` checks in one go, so that no step waits for long
BROKEN = "block accounting is broken"
IN_HOST = -1  # among the blocks of a prefix: one that host memory has
NONE = -2  # in a block table: the block behind the window was freed


def chain(parent: Hash, packed: bytes) -> Hash:
    """The hash of a full block of tokens, as pack_u32 has them, that follows the block (or salt) hashed as `parent`."""
    return hashlib.blake2b(parent + packed, digest_size=16).digest()


def root(salt: str) -> Hash:
    """The start of a hash chain. Sequences with different salts share no blocks."""
    return hashlib.blake2b(salt.encode(), digest_size=16).digest()


def extend_chain(
    hashes: list[Hash], tokens: Sequence[int], size: int, salt: str, pictures: Sequence[Picture] = ()
) -> None:
    """Append the hashes of the full blocks of `tokens` that are not in `hashes` yet. pictures: images among the tokens,
    whose blocks count as equal only where their pixels are."""
    packed = pack_u32(tokens[len(hashes) * size : len(tokens) // size * size])
    parent = hashes[-1] if hashes else root(salt)
    for at in range(0, len(packed), 4 * size):
        own = packed[at : at + 4 * size]
        if pictures:
            start = len(hashes) * size
            shown = (one for one in pictures if one.start < start + size and start < one.start + one.length)
            own += b"".join(pack_u32((one.start, one.rows, one.columns)) + one.digest for one in shown)
        parent = chain(parent, own)
        hashes.append(parent)


def _key(digest: Hash, group: int) -> Hash:
    """The hash by which a block of a cache group is found."""
    return digest + bytes((group,)) if group else digest


class Prefix(NamedTuple):
    """The cached beginning of a sequence. Its blocks are not held yet: call `Blocks.hold`."""

    matched: int  # hashes of the chain
    tables: list[list[int]]  # of each cache group: blocks, IN_HOST and NONE

    def blocks(self) -> Iterator[int]:
        """Lists the blocks of all groups, and IN_HOST."""
        return (block for table in self.tables for block in table if block != NONE)

    @property
    def in_host(self) -> int:
        """How many blocks only host memory has."""
        return sum(table.count(IN_HOST) for table in self.tables)


class Blocks:
    """One replica's block pool. All methods but the checks take constant time a block."""

    def __init__(
        self,
        count: int,
        size: int,
        prefix_cache: bool = True,
        tier: HostTier | None = None,
        snapshots: Snapshots | None = None,
        groups: Groups = ONE_GROUP,
    ):
        """size: tokens of an entry in a block table, which has a hash.

        Raises ValueError for snapshots without a prefix cache: they are found by the hashes of its blocks.
        """
        if snapshots is not None and snapshots.count and not prefix_cache:
            raise ValueError(f"{snapshots.count} state snapshots, but no prefix cache")
        self.count = count
        self.tier = tier or HostTier(0)
        self.snapshots = snapshots or Snapshots()
        self.size = size
        self.groups = groups
        self._tokens = [group.entries * size for group in groups]  # of a block
        self.windows = any(group.window for group in groups)  # whether `release` frees blocks
        self.unit = math.lcm(*(group.entries for group in groups))  # hashes after which blocks of all groups end
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

    def capacity(self, length: int) -> int:
        """Tokens that the pool holds, of sequences of `length` tokens."""
        return cache_groups.capacity(self.groups, self.size, self.count, length)

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

    def match(self, hashes: Sequence[Hash]) -> Prefix:
        """The longest cached prefix of a hash chain.

        Blocks that only host memory has count where enough of them are there to be worth a copy.
        """
        host = self.tier.count > 0
        if not self._begins(hashes, host):  # mostly, where a router asks many replicas
            return Prefix(0, [[] for _ in self.groups])
        found = self._match(hashes, host)
        return self._match(hashes, False) if 0 < found.in_host < self.tier.least else found

    def _begins(self, hashes: Sequence[Hash], host: bool) -> bool:
        """Whether there may be a prefix: the first group has the chain's first block, or has a window."""
        group = self.groups[0]
        if len(hashes) < group.entries:
            return False
        return group.window > 0 or self._find(hashes[group.entries - 1], 0, host) != NONE

    def _match(self, hashes: Sequence[Hash], host: bool) -> Prefix:
        tables: list[list[int]] = []
        count = len(hashes)
        for g, group in enumerate(self.groups):
            table: list[int] = []
            if not group.window:
                for digest in hashes[group.entries - 1 : count : group.entries]:
                    if (block := self._find(digest, g, host)) == NONE:
                        break
                    table.append(block)
                count = min(count, len(table) * group.entries)
            tables.append(table)
        count -= count % self.unit
        windows = [g for g, group in enumerate(self.groups) if group.window]
        end = -1
        while windows and end != count:  # until all windows have what they need before the same border
            end = count
            for g in windows:
                tables[g] = self._window_before(hashes, count, g, host)
                count = len(tables[g]) * self.groups[g].entries
        ends = (count // group.entries for group in self.groups)
        return Prefix(count, [table[:end] for table, end in zip(tables, ends, strict=True)])

    def _window_before(self, hashes: Sequence[Hash], count: int, g: int, host: bool) -> list[int]:
        """A group's table of the longest prefix of up to `count` hashes of which it has the blocks of the window."""
        group = self.groups[g]
        while count > 0:
            stop = count // group.entries
            first = self._first_read(group, count * self.size)
            table: list[int] = []
            for i in range(stop - 1, first - 1, -1):
                if (block := self._find(hashes[(i + 1) * group.entries - 1], g, host)) == NONE:
                    count = i * group.entries
                    count -= count % self.unit
                    break
                table.append(block)
            else:
                return [NONE] * first + table[::-1]
        return []

    def _first_read(self, group: CacheGroup, computed: int) -> int:
        """The first entry of a group's table that layers may read where so many tokens are computed."""
        return cache_groups.first_read(group.window, computed, group.chunked) // (group.entries * self.size)

    def _find(self, digest: Hash, g: int, host: bool) -> int:
        """A block of a group, by the hash of its last tokens; NONE: it is not cached."""
        key = _key(digest, g)
        block = self._by_hash.get(key, NONE)
        return IN_HOST if block == NONE and host and key in self.tier else block

    def hold(self, prefix: Prefix, hashes: Sequence[Hash]) -> list[list[int]]:
        """The block tables of a sequence with this prefix: adds a reference to each block, and has those in host memory
        copied into new ones.

        hashes: the chain that was matched. `num_unreferenced` blocks must be free.
        """
        keys = [
            [_key(digest, g) for digest in hashes[group.entries - 1 : prefix.matched : group.entries]]
            for g, group in enumerate(self.groups)
        ]
        for table, of_table in zip(prefix.tables, keys, strict=True):
            for block, key in zip(table, of_table, strict=True):
                if block == IN_HOST:
                    self.tier.pin(key)  # before anything is evicted to make room
                elif block != NONE:
                    self.incref([block])
        held = [list(table) for table in prefix.tables]
        for table, of_table in zip(held, keys, strict=True):
            for i, key in enumerate(of_table):
                if table[i] == IN_HOST:
                    (table[i],) = self.allocate(1)
                    self.tier.load(key, table[i])
                    self.cache(table[i], key)
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

    # -- block tables

    def lacking(self, tables: Sequence[Sequence[int]], tokens: int) -> list[int]:
        """How many blocks of each group a sequence with these tables lacks to have so many of its tokens computed."""
        if len(tables) == 1:  # many times a step
            return [-(-tokens // self._tokens[0]) - len(tables[0])]
        counts = zip(self._tokens, tables, strict=True)
        return [max(0, -(-tokens // each) - len(table)) for each, table in counts]

    def room(self, tables: Sequence[Sequence[int]]) -> int:
        """Tokens for which a sequence has blocks of all groups."""
        if len(tables) == 1:
            return self._tokens[0] * len(tables[0])
        return min(each * len(table) for each, table in zip(self._tokens, tables, strict=True))

    def release(self, tables: Sequence[list[int]], computed: int) -> None:
        """Free a sequence's blocks that no layer reads any more where so many of its tokens are computed."""
        for group, table in zip(self.groups, tables, strict=True):
            if not group.window:
                continue
            stop = first = self._first_read(group, computed)
            while first and table[first - 1] != NONE:
                first -= 1
            self.free(table[first:stop])
            table[first:stop] = [NONE] * (stop - first)

    def free_all(self, tables: Sequence[Sequence[int]]) -> None:
        """Free what a sequence has."""
        for group, table in zip(self.groups, tables, strict=True):
            self.free([block for block in table if block != NONE] if group.window else table)

    def cache_full(self, tables: Sequence[Sequence[int]], hashes: Sequence[Hash], first: int, stop: int) -> list[int]:
        """Enter a sequence's blocks that end with hashes first:stop into the prefix cache, and list them."""
        if self.groups == ONE_GROUP:  # many times a step
            table = tables[0]
            for i in range(first, stop):
                self.cache(table[i], hashes[i])
            return list(table[first:stop])
        entered = []
        for group, table in enumerate(tables):
            each = self.groups[group].entries
            for i in range(first // each, stop // each):
                if (block := table[i]) != NONE:
                    digest = hashes[(i + 1) * each - 1]
                    self.cache(block, _key(digest, group) if group else digest)
                    entered.append(block)
        return entered

    # -- single blocks

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

        Of two with equal content only the first is entered, unless no sequence holds it: then it was of no use, for
        lack of a state snapshot, and the second one will stay longer.
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
        """Raise RuntimeError unless all blocks are accounted for. holders: every sequence's block tables."""
        for _ in self.audit(holders):
            pass

    def audit(self, holders: Iterable[Sequence[int]]) -> Iterator[None]:
        """`check` in steps, a SLICE of blocks each. The pool must not change before its end; it may be dropped."""
        expected = [0] * self.count
        for blocks in holders:
            for block in blocks:
                if block != NONE:
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
