"""Sums of two GPUs of one host beside other work: copy engines carry each one's part to the other.

NCCL's kernels need multiprocessors: they wait until products that fill the GPU leave them some, and the next products
wait for them. Copies need none (docs/performance.md).
"""

from __future__ import annotations

import ctypes
from functools import partial

import torch
from torch import Tensor

from ..kernels.collective.allreduce import SymmetricMemory, memory
from .base import Comm
from .broadcast import collective_try
from .symmetric_memory import call

MAX_BYTES = 65 << 20  # bytes that one call carries: half a step of 8192 rows of 8192 elements, and a cut's remainder
REGION = (
    2 * MAX_BYTES + 256
)  # bytes of each rank's region: two slots, and the number of the newest call that lies there
_WRAP = 1 << 32
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ, which compares as numbers that wrap


class DmaAllReduce:
    """One rank's side. Both make the same calls, each on one stream."""

    def __init__(self, peers: SymmetricMemory, start: int):
        """start: of REGION zeroed bytes in both ranks' regions."""
        self._rank = peers.rank
        self._regions = [peers.base + r * peers.stride + start for r in range(2)]
        self._slots = memory(self._regions[peers.rank], 2 * MAX_BYTES).view(2, MAX_BYTES)
        self._calls = 0

    def exchange(self, x: Tensor) -> Tensor:
        """The other rank's x, contiguous and of at most MOST bytes: here until the stream begins the next call but one.

        Of two slots by turns. Who sends call n has seen that the other rank has sent call n - 1, which comes on its
        stream after all that reads the slot of call n - 2, the one that is written now.
        """
        return self._exchange(x, 1 - self._rank)

    def try_out(self, to: int) -> None:
        """Two calls with rank `to`, which may be this one alone. Raises RuntimeError where they do not work."""
        for turn in range(2):
            x = torch.full((64,), 1 + 2 * turn + self._rank, dtype=torch.uint8, device=self._slots.device)
            if (self._exchange(x, to) != 1 + 2 * turn + to).any():
                raise RuntimeError(f"what rank {to} copies does not arrive")

    def _exchange(self, x: Tensor, to: int) -> Tensor:
        self._calls = (self._calls + 1) % _WRAP
        turn, count = self._calls % 2, ctypes.c_uint32(self._calls)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        there, size = ctypes.c_uint64(self._regions[to] + turn * MAX_BYTES), ctypes.c_size_t(x.nbytes)
        theirs, ours = (ctypes.c_uint64(self._regions[r] + 2 * MAX_BYTES) for r in (to, self._rank))
        call("cuMemcpyDtoDAsync_v2", there, ctypes.c_uint64(x.data_ptr()), size, stream)
        # The driver puts a fence of the whole system before the number, so that who sees it sees the copy.
        call("cuStreamWriteValue32_v2", stream, theirs, count, 0)
        call("cuStreamWaitValue32_v2", stream, ours, count, _AT_LEAST)
        return self._slots[turn, : x.nbytes].view(x.dtype).view(x.shape)


def try_dma_allreduce(host: Comm, peers: SymmetricMemory, start: int) -> tuple[DmaAllReduce | None, str]:
    """A side of each of two ranks that has been tried out; or why there is none, on both alike. Collective."""
    copies = DmaAllReduce(peers, start)
    for to in (peers.rank, 1 - peers.rank):  # on one's own memory first: where the driver refuses, nobody waits
        if why := collective_try(host, partial(copies.try_out, to)):
            return None, why
    return copies, ""
