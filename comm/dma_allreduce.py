"""All-reduces of two GPUs of one host by DMA copies, for use while GEMMs run.

Each GPU's copy engine writes its part to the other GPU. NCCL's kernels need multiprocessors: they wait until GEMMs that
fill the GPU leave some, and the next GEMMs wait for them. DMA copies need none (docs/measurements).
"""

from __future__ import annotations

import ctypes
from functools import partial

import torch
from torch import Tensor

from ..kernels.collective.allreduce import SymmetricMemory, memory
from ..kernels.device import current_stream
from .base import Comm
from .broadcast import collective_try
from .symmetric_memory import call

MAX_BYTES = 65 << 20  # of one call: a microbatch of 4096 tokens of 8192 elements, and the split's rounding
REGION = 2 * MAX_BYTES + 256  # bytes of each rank's region: two slots and the number of the newest call
_WRAP = 1 << 32
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ; its comparison allows for wrapping


class DmaAllReduce:
    """One rank's side. Both ranks make the same calls, each on one CUDA stream."""

    def __init__(self, peers: SymmetricMemory, start: int):
        """start: where REGION zeroed bytes begin in both ranks' symmetric memory."""
        self._rank = peers.rank
        self._regions = [peers.base + r * peers.stride + start for r in range(2)]
        self._slots = memory(self._regions[peers.rank], 2 * MAX_BYTES).view(2, MAX_BYTES)
        self._calls = 0

    def exchange(self, x: Tensor) -> Tensor:
        """Returns the peer's x, valid until the second next call. x is contiguous and has at most MAX_BYTES.

        Calls alternate between two slots, so call n overwrites the slot of call n - 2. That is safe: this rank has
        seen call n - 1 of the other rank, which stands on that rank's CUDA stream after all reads of call n - 2.
        """
        return self._exchange(x, 1 - self._rank)

    def try_out(self, to: int) -> None:
        """Make two test calls with rank `to`, which may be this rank. Raises RuntimeError where they do not work."""
        for slot in range(2):
            x = torch.full((64,), 1 + 2 * slot + self._rank, dtype=torch.uint8, device=self._slots.device)
            if (self._exchange(x, to) != 1 + 2 * slot + to).any():
                raise RuntimeError(f"what rank {to} copies does not arrive")

    def _exchange(self, x: Tensor, to: int) -> Tensor:
        self._calls = (self._calls + 1) % _WRAP
        slot, count = self._calls % 2, ctypes.c_uint32(self._calls)
        stream = ctypes.c_void_p(current_stream())
        there, size = ctypes.c_uint64(self._regions[to] + slot * MAX_BYTES), ctypes.c_size_t(x.nbytes)
        theirs, ours = (ctypes.c_uint64(self._regions[r] + 2 * MAX_BYTES) for r in (to, self._rank))
        call("cuMemcpyDtoDAsync_v2", there, ctypes.c_uint64(x.data_ptr()), size, stream)
        # The driver puts a system-wide fence before the number: a rank that sees the number sees the copy.
        call("cuStreamWriteValue32_v2", stream, theirs, count, 0)
        call("cuStreamWaitValue32_v2", stream, ours, count, _AT_LEAST)
        return self._slots[slot, : x.nbytes].view(x.dtype).view(x.shape)


def try_dma_allreduce(host: Comm, peers: SymmetricMemory, start: int) -> tuple[DmaAllReduce | None, str]:
    """A tested DmaAllReduce on both ranks, or None and the reason on both. Collective."""
    dma = DmaAllReduce(peers, start)
    for to in (peers.rank, 1 - peers.rank):  # own memory first: where the driver refuses, no rank waits
        if why := collective_try(host, partial(dma.try_out, to)):
            return None, why
    return dma, ""
