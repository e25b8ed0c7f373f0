"""Ranks as threads of one process: for tests without mpirun, `--multithread` and jobs of one rank. CPU tensors."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .base import Epilogue


class PeerFailed(RuntimeError):
    """Another rank of this process has raised. Look at that exception, not at this one."""


class _Group:
    """State that the members of one ThreadComm share.

    Collectives alternate between two sets of slots. Two are enough: the barrier of each collective keeps any rank at
    most one collective ahead of the slowest reader.
    """

    def __init__(self, size: int):
        self.size = size
        self.slots: list[list[Any]] = [[None] * size, [None] * size]
        self.barrier = threading.Barrier(size)
        self._mail: dict[tuple[int, int], queue.SimpleQueue[Any]] = {}  # made when used: most pairs never talk
        self._failed = False
        self.children: list[_Group] = []

    def mail(self, source: int, to: int) -> queue.SimpleQueue[Any]:
        """The messages between two ranks."""
        box = self._mail.get((source, to))
        if box is None:
            box = self._mail.setdefault((source, to), queue.SimpleQueue())
            if self._failed:  # abort() may have looked before this box was there
                box.put(PeerFailed)
        return box

    def abort(self) -> None:
        self._failed = True
        self.barrier.abort()
        for box in list(self._mail.values()):
            box.put(PeerFailed)
        for child in self.children:
            child.abort()


class ThreadComm:
    """The HostComm protocol (comm/base.py) among threads. One instance belongs to one thread at a time."""

    def __init__(self, group: _Group, rank: int):
        self.group = group
        self.rank = rank
        self.size = group.size
        self._parity = 0

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order. The values are shared objects, not copies."""
        slots = self.group.slots[self._parity]
        self._parity ^= 1
        slots[self.rank] = value
        try:
            self.group.barrier.wait()
        except threading.BrokenBarrierError:
            raise PeerFailed("another rank of this process has failed") from None
        return list(slots)

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.size > 1:
            parts = self.exchange(x.clone())
            torch.add(parts[0], parts[1], out=x)  # in rank order on every rank, so bitwise equal
            for part in parts[2:]:
                x += part
        return x

    def all_reduce_async(self, x: Tensor, epilogue: Epilogue | None = None) -> None:
        """None: nothing overlaps with the calling thread."""

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack(self.exchange(x.clone()))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self.all_reduce(x.clone())[self.rank]

    def all_to_allv(self, x: Tensor, counts: list[int], out: Tensor, out_counts: list[int]) -> Tensor:
        mine = x.clone().split(counts)
        return torch.cat([parts[self.rank] for parts in self.exchange(mine)], out=out)

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        source = self.exchange(x.clone() if self.rank == root else None)[root]
        return x if self.rank == root else x.copy_(source)

    def send(self, x: Tensor, to: int) -> None:
        self.group.mail(self.rank, to).put(x.clone())

    isend = send  # a send never waits here

    def recv(self, x: Tensor, source: int) -> Tensor:
        return x.copy_(self._take(source))

    def barrier(self) -> None:
        self.exchange(None)

    def split(self, color: int, key: int) -> ThreadComm:
        everyone = self.exchange((color, key, self.rank))
        members = sorted((k, r) for c, k, r in everyone if c == color)
        rank = members.index((key, self.rank))
        group = _Group(len(members)) if rank == 0 else None
        if group is not None:
            self.group.children.append(group)
        groups = self.exchange(group)
        return ThreadComm(groups[members[0][1]], rank)

    def subgroup(self, ranks: Sequence[int]) -> ThreadComm:
        first, rank = ranks[0], ranks.index(self.rank)
        if rank:
            return ThreadComm(self._take(first), rank)
        group = _Group(len(ranks))
        self.group.children.append(group)
        for other in ranks[1:]:
            self.group.mail(first, other).put(group)
        return ThreadComm(group, 0)

    def _take(self, source: int) -> Any:
        """The next message from this rank."""
        value = self.group.mail(source, self.rank).get()
        if value is PeerFailed:
            raise PeerFailed("another rank of this process has failed")
        return value


class ThreadResultChannel:
    """Bytes from rank 1 of a group to its rank 0, in order."""

    def __init__(self, group: ThreadComm):
        self._box = group.exchange(queue.SimpleQueue[bytes]() if group.rank == 0 else None)[0]

    def send(self, data: bytes) -> None:
        self._box.put(data)

    def collect(self) -> list[bytes]:
        """Rank 0: the messages that have arrived."""
        found = []
        while not self._box.empty():
            found.append(self._box.get())
        return found


def run(function: Callable[[ThreadComm], Any], size: int) -> list[Any]:
    """Call function(comm) on `size` threads; their results in rank order.

    Raises the first exception that a rank raised, after all threads have ended.
    """
    world = _Group(size)
    results: list[Any] = [None] * size
    failures: list[BaseException] = []

    def rank_main(rank: int) -> None:
        try:
            results[rank] = function(ThreadComm(world, rank))
        except BaseException as error:  # handed to the caller below
            failures.append(error)
            world.abort()

    # MKL's vector functions pick their variant at the first call. Where several threads make it at once, one of them
    # may get cosines that are off by 1e-4 (4 of 1300 processes with torch 2.13; none of 1200 after a call like this).
    torch.ones(64).exp()
    threads = [threading.Thread(target=rank_main, args=(r,), name=f"rank-{r}", daemon=True) for r in range(1, size)]
    for thread in threads:
        thread.start()
    rank_main(0)  # rank 0 has the main thread, which receives the signals that the step loop handles
    for thread in threads:
        thread.join()
    if failures:
        raise next((f for f in failures if not isinstance(f, PeerFailed)), failures[0])
    return results
