"""Between a step on a GPU and the host while the step runs: tokens and choices one way, experts and sums the other.

Kernels read and write pinned memory (host_exchange.cu), and both sides look at flags there. So a step of few tokens
costs the host one launch a layer, which waits for nobody, and no event: the GPU waits in `collect` for the CPU's part.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import host_memory, jit
from ..cpp import ops

THREADS = 256  # of a block
BLOCKS = 32  # that read host memory at once: half a megabyte under way, where PCIe takes a tenth of it
MOST = THREADS  # experts of a list
LINE = 32  # int32 of two cache lines: flags do not share one
PAUSE = 0.2  # seconds between two looks at whether the GPU still works
_HOST_POINTERS = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM


class Part(NamedTuple):
    """One tensor of a layer's experts."""

    there: Tensor  # [E, ...] on the host, pinned
    here: Tensor  # [n, ...] on the device


class Exchange:
    """Of one rank with a GPU: layers use it one after the other."""

    def __init__(self, device: torch.device):
        self._flags = host_memory.zeros((2 * LINE + 1 + MOST,), torch.int32, pin=True)
        host_memory.check_pinned("experts in host memory", [self._flags])
        self.sent, self.made, self.list = self._flags[:LINE], self._flags[LINE : 2 * LINE], self._flags[2 * LINE :]
        self.state = torch.zeros(2, dtype=torch.int32, device=device)
        self._list = self.list.numpy()
        self._count = 0  # of `wait`, which is that of `send`

    def wait(self) -> None:
        """Until what the next `send` brings is here."""
        if int(self.made[1]):
            raise RuntimeError("the CPU's part of a step with experts in host memory has failed before")
        self._count = self._count + 1 & 0xFFFFFFFF
        while not self._sent(PAUSE):
            # It raises what the GPU has to say. What was sent since the last look counts.
            if torch.cuda.current_stream().query() and not self._sent(0):
                raise RuntimeError("the GPU has done all that was launched, but sent nothing to the host")

    def _sent(self, seconds: float) -> bool:
        return bool(_flags()[0](self.sent.data_ptr(), self._count, int(seconds * 1e9)))

    def give(self) -> None:
        """What the CPU makes of it lies where `collect` reads it."""
        _flags()[1](self.made.data_ptr(), self._count)

    def give_up(self) -> None:
        """It never will: nobody waits for it any more."""
        _flags()[1](self.made.data_ptr() + 4, 1)

    def ask(self, experts: np.ndarray) -> None:
        """Experts that the next `fetch` brings, which is not launched yet."""
        self._list[1 : 1 + len(experts)] = experts
        self._list[0] = len(experts)


@functools.cache
def _flags() -> tuple[Callable[..., int], Callable[..., None]]:
    library = ops.libraries()["flags"]
    look, put = library.flag_wait, library.flag_set
    look.argtypes, look.restype = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int64], ctypes.c_int
    put.argtypes, put.restype = [ctypes.c_void_p, ctypes.c_uint32], None
    return look, put


@functools.cache
def supports(device: torch.device) -> bool:
    """Whether kernels there reach pinned memory by its address on the host, and the host has operations. Not where
    launches wait for kernels, as `collect` would wait for what comes after its launch."""
    if device.type != "cuda" or not ops.available() or os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        return False
    found = ctypes.c_int()
    index = torch.cuda.current_device() if device.index is None else device.index
    jit.check(jit.libcuda().cuDeviceGetAttribute(ctypes.byref(found), _HOST_POINTERS, index), "asking for an attribute")
    return bool(found.value)


def takes(parts: Sequence[Part]) -> bool:
    """Whether `fetch` copies these."""
    return all(len(part.here) <= MOST for part in parts) and all(
        part.there.is_pinned() and part.there.is_contiguous() and part.there[0].nbytes % 16 == 0 == x.data_ptr() % 16
        for part in parts
        for x in part
    )


def table(parts: Sequence[Part], device: torch.device) -> Tensor:
    """`fetch`'s parts."""
    rows = [[part.there.data_ptr(), part.there[0].nbytes, part.here.data_ptr()] for part in parts]
    return torch.tensor(rows, dtype=torch.int64).to(device)


def send(x: Tensor, ids: Tensor, weights: Tensor, slots: Tensor, host: Sequence[Tensor], exchange: Exchange) -> Tensor:
    """To the host's x, ids and weights, which `Exchange.wait` waits for. x [T, H], whose rows have a multiple of 16
    bytes; all contiguous. slots int32 [experts of the router]. Returns slots[ids]."""
    numbers, units = torch.empty_like(ids), x.nbytes // 16
    blocks = max(1, min(BLOCKS, units // THREADS))
    kernel = jit.kernel("host_exchange", "host_send", x.dtype, **sizes())
    where = x, ids, weights, slots, *host, numbers, exchange.state, exchange.sent
    kernel((blocks, 1, 1), THREADS, *where, units, ids.numel())
    return numbers


def fetch(parts: Tensor, ids: Tensor, most: int, first: int, exchange: Exchange) -> tuple[Tensor, Tensor, Tensor]:
    """Bring the experts that were asked for, `most` at most. Returns the place of each pair's expert [T, k], or `most`;
    how many there are [1]; and which [most] int64."""
    numbers = torch.empty_like(ids)
    count, of = ids.new_empty(1), ids.new_empty(most, dtype=torch.int64)
    kernel = jit.kernel("host_exchange", "host_fetch", torch.float32, **sizes())
    where = exchange.list, parts, ids, count, of, numbers
    kernel((BLOCKS, 1, 1), THREADS, *where, len(parts), ids.numel(), most, first)
    return numbers, count, of


def collect(resident: Tensor | None, copied: Tensor | None, made: Tensor, like: Tensor, exchange: Exchange) -> Tensor:
    """What resident experts have made, and copied ones, and the CPU [T, H] f32, in pinned memory, added up: like
    `like`. Waits for `Exchange.give`."""
    y = torch.empty_like(like)
    kernel = jit.kernel("host_exchange", "host_collect", like.dtype, **sizes(resident is not None, copied is not None))
    args = (y if resident is None else resident), (y if copied is None else copied), made, y
    blocks = -(-y.numel() // (4 * THREADS))
    kernel((blocks, 1, 1), THREADS, *args, exchange.state, exchange.made, y.numel())
    return y


def sizes(resident: bool = False, copied: bool = False) -> dict[str, int]:
    """What host_exchange.cu is compiled for."""
    return dict(THREADS=THREADS, RESIDENT=int(resident), COPIED=int(copied))
