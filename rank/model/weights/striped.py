"""Striped loading: one rank reads each byte of a checkpoint and sends it to the ranks that need it.

It is for network file systems, from which each byte is read once a job. The tensors that any rank needs are divided, in
file order, into one stripe per rank. A rank reads its stripe in large chunks, a few of them ahead. In every round, all
ranks exchange the parts of their current chunks that others need. All ranks know all headers and all ranks' slices, so
both ends of a message compute its layout, and messages have no headers.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from ....comm.base import HostComm
from ....comm.broadcast import gather_bytes
from ....errors import MODEL, FatalError
from ... import untrusted_files
from ...safetensors_header import Entry, rows
from .filler import Filler
from .safetensors import Checkpoint, Ranges, elements, kept, put, span, widened, window
from .slicing import ShardedModule, Slice

log = logging.getLogger(__name__)

CHUNK = 32 << 20  # most bytes of one read
ROUND = 512 << 20  # most bytes that a rank receives in a round: with many ranks, chunks are smaller
READERS = 2  # concurrent reads of a rank: network file systems have high latency, not low bandwidth
PATIENCE = 30.0  # seconds after which a read without an answer is logged
ALIGN = 16  # bytes: the alignment of a message's parts, so that they can be viewed as elements


class Extent(NamedTuple):
    """Rows first to last of a tensor, `offset` bytes into a chunk."""

    tensor: str
    first: int
    last: int
    offset: int


class Chunk(NamedTuple):
    """`size` bytes of a file from `start` on, which consist of segments."""

    file: str
    start: int
    size: int
    extents: list[Extent]


class Move(NamedTuple):
    """Rows first to last of a segment's tensor, for the receiver's slice number `place` of that tensor."""

    extent: Extent
    place: int
    first: int
    last: int
    ranges: Ranges  # of the axes after the first


def cut(tensors: Sequence[tuple[str, str, Entry]], stripes: int, most: int = CHUNK) -> list[list[Chunk]]:
    """Divide tensors (name, file, entry), in file order, into equal stripes of chunks of at most `most` bytes.

    Divisions lie between rows, so stripes differ by up to a row, and a chunk has at least one row.
    """
    total = sum(entry.stop - entry.start for _, _, entry in tensors)
    found: list[list[Chunk]] = [[] for _ in range(stripes)]
    stripe = done = 0
    for name, file, entry in tensors:
        count, width = rows(entry.shape)[0], entry.width
        first = 0
        while width and first < count:
            limit = total * (stripe + 1) // stripes
            if done >= limit:
                stripe += 1
                continue
            start = entry.start + first * width
            chunk = found[stripe][-1] if found[stripe] else None
            if chunk is None or (chunk.file, chunk.start + chunk.size) != (file, start) or chunk.size + width > most:
                chunk = Chunk(file, start, 0, [])
                found[stripe].append(chunk)
            fit = max(1, (most - chunk.size) // width)
            take = min(count - first, fit, -(-(limit - done) // width))
            chunk.extents.append(Extent(name, first, first + take, chunk.size))
            found[stripe][-1] = chunk._replace(size=chunk.size + take * width)
            first += take
            done += take * width
    return found


def moves(chunk: Chunk, wanted: dict[str, list[Ranges]]) -> Iterator[Move]:
    """The parts of a chunk that a rank with these slices needs, in the order of sending."""
    for extent in chunk.extents:
        for place, ranges in enumerate(wanted.get(extent.tensor, ())):
            first, last = max(extent.first, ranges[0][0]), min(extent.last, ranges[0][1])
            if first < last:
                yield Move(extent, place, first, last, ranges[1:])


class Striped:
    """One rank's side of striped loading. Collective over world: all ranks make one and call `fill`.

    `parts` need no memory before `fill`. buffers: bytes of host memory that `fill` takes on this rank.
    """

    def __init__(self, checkpoint: Checkpoint, parts: Sequence[Slice], world: HostComm):
        self._path = checkpoint.directory
        self._world = world
        self._parts: dict[str, list[Slice]] = {}
        mine: dict[str, list[Ranges]] = {}
        for part in _not_empty(parts):
            self._parts.setdefault(part.tensor, []).append(part)
            mine.setdefault(part.tensor, []).append(widened(checkpoint.find(part.tensor)[1], _ranges(part)))
        kind = dict[str, list[Ranges]]
        self._wanted = [
            msgspec.msgpack.decode(text, type=kind) for text in gather_bytes(world, msgspec.msgpack.encode(mine))
        ]
        needed = [(name, *checkpoint.find(name)) for name in dict.fromkeys(n for one in self._wanted for n in one)]
        needed.sort(key=lambda one: (one[1], one[2].start))
        self._entries = {name: entry for name, _, entry in needed}
        # The last pipeline stage has the first ranks: assigned in reverse, many bytes need not be sent.
        self._stripes = cut(needed, world.size, min(CHUNK, ROUND // world.size))[::-1]
        self.total = sum(chunk.size for stripe in self._stripes for chunk in stripe)
        self._mine = self._stripes[world.rank]
        sent = [[sum(map(self._bytes, side)) for side in self._messages(chunks)] for chunks in self._rounds()]
        self._most = max((out for out, _ in sent), default=0), max((into for _, into in sent), default=0)
        self.buffers = math.prod(Reader.buffers(self._mine)) + sum(self._most)

    def peak(self, bytes_of: Callable[[ShardedModule], int]) -> int:
        """The most bytes of this rank's modules that are filled at the same time."""
        me = self._world.rank
        left: dict[ShardedModule, int] = {}  # elements to come
        for part in (part for parts in self._parts.values() for part in parts):
            left[part.module] = left.get(part.module, 0) + part.numel
        begun: set[ShardedModule] = set()
        held = most = 0
        for chunks in self._rounds():
            order = [chunks[me], *chunks[:me], *chunks[me + 1 :]]  # as _exchange stores them
            for move in (move for chunk in order if chunk is not None for move in moves(chunk, self._wanted[me])):
                part = self._parts[move.extent.tensor][move.place]
                module = part.module
                if not (count := self._kept(move, part)):
                    continue
                held += bytes_of(module) if module not in begun else 0
                begun.add(module)
                most = max(most, held)
                left[module] -= count
                held -= bytes_of(module) if not left[module] else 0
        return most

    def fill(self, filler: Filler, progress: Callable[[int, int], None]) -> None:
        """Read and exchange everything. progress gets the bytes that all ranks have read so far, and all bytes."""
        self._filler = filler
        self._outbox, self._inbox = (torch.empty(size, dtype=torch.uint8) for size in self._most)
        started, done = time.monotonic(), 0
        progress(done, self.total)
        with Reader(self._path, self._mine) as reader:
            for chunks in self._rounds():
                own = chunks[self._world.rank]
                self._exchange(chunks, reader.next() if own is not None else self._outbox[:0])
                done += sum(chunk.size for chunk in chunks if chunk is not None)
                progress(done, self.total)
        del self._outbox, self._inbox, self._filler
        if self._world.rank == 0:
            seconds = max(time.monotonic() - started, 1e-9)
            log.info(
                "read %.2f GB in %.1f s, %.2f GB/s: each byte once, by one of %d ranks",
                self.total / 1e9, seconds, self.total / 1e9 / seconds, self._world.size,
            )  # fmt: skip

    def _rounds(self) -> Iterator[tuple[Chunk | None, ...]]:
        """The chunks of all ranks, round by round."""
        return zip_longest(*self._stripes)

    def _exchange(self, chunks: Sequence[Chunk | None], data: Tensor) -> None:
        """Exchange one round. data: [bytes] of this rank's chunk. chunks: those of all ranks."""
        me = self._world.rank
        own = chunks[me]
        for move in moves(own, self._wanted[me]) if own is not None else ():
            self._store(move, self._view(data, move))
        if self._world.size == 1:
            return
        out, into = self._messages(chunks)
        out_bytes, in_bytes = [[self._bytes(message) for message in side] for side in (out, into)]
        at = 0
        for move in (move for one in out for move in one):
            view = self._view(data, move)
            self._outbox[at : at + view.numel()].view(view.shape).copy_(view)
            at += self._padded_size(move)
        inbox = self._inbox[: sum(in_bytes)]
        self._world.all_to_allv(self._outbox[:at], out_bytes, inbox, in_bytes)
        at = 0
        for move in (move for one in into for move in one):
            self._store(move, inbox[at : at + math.prod(self._shape(move))].view(self._shape(move)))
            at += self._padded_size(move)

    def _messages(self, chunks: Sequence[Chunk | None]) -> tuple[list[list[Move]], list[list[Move]]]:
        """The bytes that this rank sends to each rank in a round and receives from each."""
        me = self._world.rank
        own = chunks[me]
        out = [list(moves(own, wanted)) if own is not None and r != me else [] for r, wanted in enumerate(self._wanted)]
        into = [list(moves(c, self._wanted[me])) if c is not None and r != me else [] for r, c in enumerate(chunks)]
        return out, into

    def _bytes(self, message: list[Move]) -> int:
        return sum(map(self._padded_size, message))

    def _shape(self, move: Move) -> tuple[int, ...]:
        """The shape of a move's bytes: that of its elements, with the last axis in bytes."""
        begin, end = span(self._entries[move.extent.tensor], *move.ranges[-1])
        inner = [stop - start for start, stop in move.ranges]
        return (move.last - move.first, *inner[:-1], end - begin)

    def _padded_size(self, move: Move) -> int:
        """Bytes that a move takes in a message, padding included."""
        return -(-math.prod(self._shape(move)) // ALIGN) * ALIGN

    def _view(self, data: Tensor, move: Move) -> Tensor:
        """A view [rows, ..., bytes] of a move in the chunk's bytes."""
        extent, entry = move.extent, self._entries[move.extent.tensor]
        whole = data[extent.offset : extent.offset + (extent.last - extent.first) * entry.width]
        return window(whole, entry, extent.first, ((move.first, move.last), *move.ranges))

    def _store(self, move: Move, data: Tensor) -> None:
        """Copy bytes [rows, ..., bytes] into the slice that they belong to, as elements."""
        name = move.extent.tensor
        part = self._parts[name][move.place]
        if not (count := self._kept(move, part)):  # rows of others, among which this rank's could have been
            return
        target = self._filler.target(part)
        entry, target = self._entries[name], target[:, None] if len(part.shape) == 1 else target
        ranges = _ranges(part)
        put(elements(data, entry, ranges[-1]), target, entry, move.first, ranges[0])
        self._filler.arrived(part, count)

    def _kept(self, move: Move, part: Slice) -> int:
        """How many elements of a move the slice takes."""
        return kept(self._entries[move.extent.tensor], move.first, move.last, _ranges(part))


class Reader:
    """Reads chunks in order, READERS of them ahead, in its own threads. A context manager."""

    def __init__(self, path: Path, chunks: Sequence[Chunk]):
        self._path = path
        self._chunks = iter(chunks)
        self._files: dict[str, int] = {}
        count, longest = self.buffers(chunks)
        self._buffers = deque(torch.empty(longest, dtype=torch.uint8) for _ in range(count))
        self._pool = ThreadPoolExecutor(READERS, "reader")
        self._ahead: deque[tuple[Chunk, Future[Tensor]]] = deque()
        for _ in range(READERS):
            self._begin()

    @staticmethod
    def buffers(chunks: Sequence[Chunk]) -> tuple[int, int]:
        """How many buffers these chunks need, and the bytes of each."""
        longest = max((chunk.size for chunk in chunks), default=0)
        return min(len(chunks), READERS + 1), longest  # the caller has one more

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown(wait=kind is None, cancel_futures=True)  # a hanging read must not hold an error back
        if kind is None:
            for fd in self._files.values():
                os.close(fd)

    def next(self) -> Tensor:
        """The next chunk's bytes, valid until the next call.

        A read has no time limit, because a restarted file server answers again after minutes.
        """
        self._begin()
        chunk, read = self._ahead.popleft()
        waited = 0.0
        while True:
            try:
                return read.result(PATIENCE)
            except TimeoutError:
                waited += PATIENCE
                file, host = self._path / chunk.file, socket.gethostname()
                log.warning("%s: no answer from the file system for %.0f s; waiting on %s", file, waited, host)

    def _begin(self) -> None:
        chunk = next(self._chunks, None)
        if chunk is None:
            return
        buffer = self._buffers[0]
        self._buffers.rotate(-1)
        read = self._pool.submit(self._read, self._open(chunk.file), chunk, buffer[: chunk.size])
        self._ahead.append((chunk, read))

    def _open(self, file: str) -> int:
        if file not in self._files:
            try:
                self._files[file] = untrusted_files.weights_descriptor(self._path / file)
            except OSError as error:
                raise FatalError(f"{self._path / file} cannot be read: {error.strerror}", MODEL) from None
        return self._files[file]

    def _read(self, fd: int, chunk: Chunk, into: Tensor) -> Tensor:
        memory = memoryview(into.numpy().data)
        done = 0
        while done < chunk.size:
            at = chunk.start + done
            try:
                got = os.preadv(fd, [memory[done:]], at)
            except OSError as error:
                raise FatalError(
                    f"{self._path / chunk.file} cannot be read at byte {at}: {error.strerror}", MODEL
                ) from None
            if not got:
                raise FatalError(
                    f"{self._path / chunk.file} ends at byte {at}, though it was longer a moment ago", MODEL
                )
            done += got
        return into


def _ranges(part: Slice) -> Ranges:
    """Ranges of a vector as a matrix of one column."""
    return (*part.ranges, (0, 1)) if len(part.shape) == 1 else part.ranges


def _not_empty(parts: Sequence[Slice]) -> list[Slice]:
    """Drop the slices of a rank whose shard of an axis is padding alone."""
    return [part for part in parts if part.numel]
