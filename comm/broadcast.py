"""Broadcasts plans from rank 0 to the other ranks as bytes, in order. Neither side spins on a core."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from .base import Comm
from .threads import ThreadComm

HEAD = 4000  # bytes of the first message; the eager limit of shared memory is 4096 with its header
_LENGTH = 4
_RING = 8  # broadcasts in flight: one a pipeline stage, one being planned, and slack for a slow follower
SLEEP_SHORTEST, SLEEP_LONGEST = 50e-6, 300e-6  # seconds between polls for a plan while the job is busy
# The sleep between polls is a sixteenth of a long step, up to a millisecond: a plan comes a step ahead, and each poll
# takes the GIL from the thread that launches a step's kernels.
OF_STEP, SLEEP_CAP = 1 / 16, 1e-3
QUIET_AFTER = 0.05  # seconds without a plan after which a follower waits for a wake-up instead of polling
# How long it waits before it polls once without a wake-up, first and at most, in seconds. A plan that took longer than
# QUIET_AFTER, as on a host that stood still, comes after its wake-up. Each wake-up costs an idle rank processor time.
IDLE_SHORTEST, IDLE_LONGEST = 0.25, 1.0
WAKE_AFTER = 0.02  # rank 0 wakes the followers when its last plan is older; must be well below QUIET_AFTER


class PlanBroadcast(Protocol):
    rank: int  # in the group of rank 0 and its followers
    size: int

    def publish(self, data: bytes) -> None:
        """Rank 0: send data to all other ranks, without waiting for them."""

    def send(self, data: bytes, to: int) -> None:
        """Rank 0: send data to one rank of the group alone, without waiting for it."""

    def progress(self) -> bool:
        """Rank 0: progress outstanding broadcasts and messages; False when none is left."""

    def receive(self) -> bytes:
        """Follower: wait for the next data, without spinning."""

    def take(self, size: int) -> bytes:
        """The follower that it is sent to: wait for so many bytes, which a broadcast has announced."""


class Waker(Protocol):
    """Lets an idle rank sleep until rank 0 wakes it; comm/watchdog.py has the one that crosses hosts."""

    def wake(self, ranks: range) -> None: ...

    def wait(self, seconds: float) -> bool: ...


class ThreadPlanBroadcast:
    def __init__(self, world: ThreadComm):
        mine: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._queues: list[queue.SimpleQueue[bytes]] = world.exchange(mine)
        self._mine, self.rank, self.size = mine, world.rank, world.size

    def publish(self, data: bytes) -> None:
        for box in self._queues[1:]:
            box.put(data)

    def send(self, data: bytes, to: int) -> None:
        self._queues[to].put(data)

    def progress(self) -> bool:
        return False

    def receive(self) -> bytes:
        return self._mine.get()

    def take(self, size: int) -> bytes:
        return self._mine.get()


class MpiPlanBroadcast:
    """Non-blocking MPI broadcasts: a head of fixed size that holds the length, then the rest of a longer message.

    The head has a fixed size because Ibcast needs the same count on all ranks. A follower that blocked in MPI would
    spin on a core, so it polls with sleeps in between, and after QUIET_AFTER waits for a wake-up.
    """

    def __init__(self, group: Any, waker: Waker, ranks: range):
        """group: rank 0 and its followers. ranks: the followers, by rank in the world. Collective over group."""
        self._handle = group.handle.Dup()  # plans must not match a tensor's broadcast
        self.rank, self.size = group.rank, group.size
        self._waker = waker
        self._ranks = ranks  # wakes these only
        self._buffers = [np.zeros(HEAD, np.uint8) for _ in range(_RING)]
        self._requests: list[list[Any]] = [[] for _ in range(_RING)]
        self._kept: list[Any] = [None] * _RING  # the rests of long messages, which must live until they are sent
        self._sent: list[tuple[Any, np.ndarray]] = []  # messages to one rank, with their data
        self._next = 0
        self._last = 0.0  # when the last plan was published, or received
        self._step = 0.0  # seconds between the last two plans that were received

    def publish(self, data: bytes) -> None:
        slot, self._next = self._next, (self._next + 1) % _RING
        while not self._done(slot):
            time.sleep(SLEEP_SHORTEST)
        head = self._buffers[slot]
        head[:_LENGTH].view("<u4")[0] = len(data)
        inline = data[: HEAD - _LENGTH]
        head[_LENGTH : _LENGTH + len(inline)] = np.frombuffer(inline, np.uint8)
        self._requests[slot].append(self._handle.Ibcast(head, 0))
        if len(data) > len(inline):
            self._kept[slot] = np.frombuffer(data, np.uint8)[len(inline) :]
            self._requests[slot].append(self._handle.Ibcast(self._kept[slot], 0))
        now = time.monotonic()
        if now - self._last > WAKE_AFTER:
            self._waker.wake(self._ranks)  # after Ibcast: a woken rank polls for QUIET_AFTER only
        self._last = now

    def send(self, data: bytes, to: int) -> None:
        message = np.frombuffer(data, np.uint8)
        self._sent.append((self._handle.Isend(message, to), message))

    def _done(self, slot: int) -> bool:
        self._requests[slot] = [r for r in self._requests[slot] if not r.Test()]
        return not self._requests[slot]

    def progress(self) -> bool:
        self._sent = [(request, message) for request, message in self._sent if not request.Test()]
        done = [self._done(slot) for slot in range(_RING)]  # each is tested: testing is what sends it
        return bool(self._sent) or not all(done)

    def receive(self) -> bytes:
        head, began = self._buffers[0], self._last
        self._wait(self._handle.Ibcast(head, 0))
        self._last = time.monotonic()
        self._step = self._last - began
        length = int(head[:_LENGTH].view("<u4")[0])
        inline = min(length, HEAD - _LENGTH)
        data = head[_LENGTH : _LENGTH + inline].tobytes()
        if length > inline:
            rest = np.empty(length - inline, np.uint8)
            self._wait(self._handle.Ibcast(rest, 0), coming=True)
            data += rest.tobytes()
        return data

    def take(self, size: int) -> bytes:
        data = np.empty(size, np.uint8)
        self._wait(self._handle.Irecv(data, 0), coming=True)
        return data.tobytes()

    def _wait(self, request: Any, coming: bool = False) -> None:
        """coming: its data is under way, however long it takes, and no wake-up comes with its end."""
        sleep, longest = SLEEP_SHORTEST, min(max(SLEEP_LONGEST, self._step * OF_STEP), SLEEP_CAP)
        quiet, idle = time.monotonic() + QUIET_AFTER, IDLE_SHORTEST
        while not request.Test():
            if coming or time.monotonic() < quiet:
                time.sleep(sleep)
                sleep = min(sleep * 1.3, longest)
            else:
                woken = self._waker.wait(idle)  # woken: poll, the plan is coming; timed out: test once
                idle = IDLE_SHORTEST if woken else min(idle * 2, IDLE_LONGEST)
                quiet = time.monotonic() + (QUIET_AFTER if woken else 0)
                sleep = SLEEP_SHORTEST


def broadcast_bytes(world: Comm, data: bytes = b"") -> bytes:
    """Rank 0's data on every rank. Collective over world. For startup only: waiting ranks may spin."""
    length = world.broadcast(torch.tensor([len(data)]), 0)
    content = torch.zeros(int(length), dtype=torch.uint8)
    if world.rank == 0 and data:
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return world.broadcast(content, 0).numpy().tobytes() if len(content) else b""


def gather_bytes(world: Comm, data: bytes) -> list[bytes]:
    """Every rank's data, in rank order, on every rank. Collective over world. For startup only."""
    lengths = world.all_gather(torch.tensor([len(data)]))[:, 0].tolist()
    mine = torch.zeros(max(1, *lengths), dtype=torch.uint8)
    mine[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
    return [row[:n].numpy().tobytes() for row, n in zip(world.all_gather(mine), lengths, strict=True)]


def collective_try(world: Comm, step: Callable[[], object]) -> str:
    """Run a step on all ranks. Returns "" if it succeeded everywhere, else the first error, the same on all ranks.

    Collective over world."""
    why = ""
    try:
        step()
    except (RuntimeError, OSError) as error:
        why = f"rank {world.rank} of the group: {error}"
    return next((words.decode() for words in gather_bytes(world, why.encode()) if words), "")
