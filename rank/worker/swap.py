"""The KV cache's second tier: blocks in host memory, and the copies that plans ask for.

In host memory a block is one row, with its part of each layer's tensors one after the other, so that PCIe sees one
copy. On a GPU it passes through a buffer on the device. Copies out are gathered there in the step's CUDA stream, before
the step overwrites the blocks, and leave in a stream of their own while it runs. Copies in come in another one, from
when the plan is here, which is while the step before still runs. The step's stream waits for them and spreads them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels import host_memory
from ...kernels.cache.block_rows import BlockRows
from .. import protocol

BUFFER = 32 << 20  # bytes of a buffer on the device; each direction has two
NEVER = 1 << 30  # more blocks than any sequence has
TIMED = 9  # blocks of the larger copy that is timed
ROUNDS = 5


class CopyCost(NamedTuple):
    """Seconds of a copy into the cache: `start`, and `block` for each block."""

    start: float
    block: float

    def least_blocks(self, compute: float) -> int:
        """The fewest blocks that are copied sooner than computed, each in `compute` seconds; NEVER if none are."""
        gain = compute - self.block
        return min(NEVER, math.floor(self.start / gain) + 1) if gain > 0 else NEVER

    def blocks_in(self, seconds: float) -> int:
        """The number of blocks copied in that time, at least one."""
        return max(1, min(NEVER, int(seconds / self.block) if self.block else NEVER))


class HostBlocks(NamedTuple):
    """Host blocks of a replica, the same on each of its ranks, as HostTier has them."""

    total: int = 0
    least: int = 1
    most: int = 1


class Swap:
    """One rank's host blocks. Once steps run, it is used in the step thread alone."""

    def __init__(self, pool: Sequence[Tensor], count: int):
        """pool: as allocate_pool returns it. count: host blocks. Raises MemoryError."""
        self._blocks = BlockRows(pool)
        self.device = self._blocks.parts[0].device
        cuda = self.device.type == "cuda"
        self.host = host_memory.zeros((count, self._blocks.width), self._blocks.unit, cuda)
        self._lanes = (_Lane(self.host, self.device), _Lane(self.host, self.device)) if cuda else None
        self._used: dict[int, torch.cuda.Event] = {}  # by host block: after the last copy from it or to it

    def apply(self, plan: protocol.Plan) -> None:
        """Make the plan's copies. What is computed or enqueued after this finds them done."""
        if plan.swap_out:
            self.store(*_pairs(plan.swap_out))
        if plan.swap_in:
            self.load(*_pairs(plan.swap_in))

    def store(self, blocks: list[int], slots: list[int]) -> None:
        """Copy blocks of the cache to these host blocks."""
        numbers = self._numbers(blocks)
        if self._lanes is None:
            rows = self.host.new_empty(len(blocks), self._blocks.width)
            self._blocks.gather(numbers, rows)
            self.host[slots] = rows
            return
        lane = self._lanes[0]
        step = torch.cuda.current_stream()
        for some, there in lane.chunks(numbers, slots):
            buffer, free = lane.next_buffer()
            step.wait_event(free)
            self._blocks.gather(some, buffer[: len(some)])
            lane.stream.wait_stream(step)
            self._wait(lane.stream, there)
            with torch.cuda.stream(lane.stream):
                for row, slot in zip(buffer, there, strict=False):
                    self.host[slot].copy_(row, non_blocking=True)
                free.record()
            self._note(lane.stream, there)

    def load(self, slots: list[int], blocks: list[int]) -> None:
        """Copy these host blocks to blocks of the cache."""
        numbers = self._numbers(blocks)
        if self._lanes is None:
            self._blocks.spread(self.host[slots], numbers)
            return
        lane = self._lanes[1]
        step = torch.cuda.current_stream()
        for some, there in lane.chunks(numbers, slots):
            buffer, free = lane.next_buffer()
            lane.stream.wait_event(free)
            self._wait(lane.stream, there)
            with torch.cuda.stream(lane.stream):
                for row, slot in zip(buffer, there, strict=False):
                    row.copy_(self.host[slot], non_blocking=True)
            self._note(lane.stream, there)
            step.wait_stream(lane.stream)
            self._blocks.spread(buffer[: len(some)], some)
            free.record()

    def _numbers(self, blocks: list[int]) -> Tensor:
        """On the device."""
        return torch.tensor(blocks).to(self.device, non_blocking=True)  # else the host would wait for the device

    def _wait(self, stream: torch.cuda.Stream, slots: Iterable[int]) -> None:
        """The two directions have streams of their own: before a host block's next copy, its last one must be done."""
        for event in {self._used[slot] for slot in slots if slot in self._used}:
            stream.wait_event(event)

    def _note(self, stream: torch.cuda.Stream, slots: Iterable[int]) -> None:
        done = torch.cuda.Event()
        done.record(stream)
        self._used.update(dict.fromkeys(slots, done))

    def measure(self) -> CopyCost:
        """The cost of copies into the cache here. Overwrites the cache's first blocks."""
        most = min(TIMED, len(self.host), len(self._blocks.parts[0]))
        self.store([0], [0])  # compiles, as the loads do
        one, several = self._seconds(1), self._seconds(most)
        block = (several - one) / (most - 1) if most > 1 else one
        return CopyCost(max(0.0, one - block), max(0.0, block))

    def _seconds(self, count: int) -> float:
        """The shortest of several loads."""
        slots, times = list(range(count)), []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            self.load(slots, slots)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        return min(times)


class _Lane:
    """A CUDA stream for copies of one direction, and two buffers on the device."""

    def __init__(self, host: Tensor, device: torch.device):
        self.stream = torch.cuda.Stream(device)
        width = host.shape[1]
        self.rows = max(1, BUFFER // (width * host.element_size()))
        self._buffers = [torch.empty(self.rows, width, dtype=host.dtype, device=device) for _ in range(2)]
        self._free = [torch.cuda.Event() for _ in range(2)]  # recorded once its last reader is enqueued
        self._turn = 0

    def chunks(self, numbers: Tensor, slots: list[int]) -> Iterator[tuple[Tensor, list[int]]]:
        """Parts of both that a buffer holds."""
        for i in range(0, len(slots), self.rows):
            yield numbers[i : i + self.rows], slots[i : i + self.rows]

    def next_buffer(self) -> tuple[Tensor, torch.cuda.Event]:
        """A buffer, and the event after which it may be written; its user records that again."""
        self._turn ^= 1
        return self._buffers[self._turn], self._free[self._turn]


def _pairs(packed: bytes) -> tuple[list[int], list[int]]:
    numbers = protocol.unpack_u32(packed).tolist()
    return numbers[::2], numbers[1::2]
