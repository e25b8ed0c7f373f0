"""Large blocks of host memory that a GPU copies from and to: pinned, so that copies overlap with everything else.

torch's own pinned memory is rounded up to a power of two, which tens of gigabytes cannot afford. Blocks begin at
multiples of ALIGN, as kernels that read them there ask PCIe for whole lines of 128 bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import math
import resource
import weakref
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from ..errors import MEMORY, FatalError, HostMemoryError
from . import jit

ALIGN = 256  # bytes
_HOST_POINTERS = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM

log = logging.getLogger("phalanx")


def zeros(shape: tuple[int, ...], dtype: torch.dtype, pin: bool) -> Tensor:
    """Zeros on the host. pin: for a GPU; the driver then touches each page, so it lies on the caller's NUMA node.

    Unpinned pages take memory only when they are first written. Where the driver refuses to pin, as by a limit on
    locked memory, a warning is logged, and copies are slower and wait. Raises HostMemoryError, which has how much was
    asked for, and the limit on a process's memory if there is one.
    """
    size = math.prod(shape) * dtype.itemsize
    try:
        memory = np.zeros(size + ALIGN, np.uint8)
    except MemoryError:
        limit = _limit(resource.RLIMIT_AS)
        under = f" under a limit of {limit / 1e6:.0f} MB (ulimit -v), which may be raised" if limit else ""
        raise HostMemoryError(f"the system refuses {size / 1e6:.1f} MB of host memory{under}") from None
    start = -memory.ctypes.data % ALIGN
    memory = memory[start : start + size]
    if pin and memory.nbytes:
        pin_memory(memory)
    return torch.from_numpy(memory).view(dtype).view(shape)


def pinned(x: Tensor) -> Tensor:
    """A copy of x in memory that is pinned, where the driver allows it."""
    return zeros((*x.shape,), x.dtype, pin=True).copy_(x)


@functools.cache
def in_reach(device: torch.device) -> bool:
    """Whether kernels of this GPU read and write pinned memory by its address on the host."""
    found = ctypes.c_int()
    index = torch.cuda.current_device() if device.index is None else device.index
    jit.check(jit.libcuda().cuDeviceGetAttribute(ctypes.byref(found), _HOST_POINTERS, index), "asking for an attribute")
    return bool(found.value)


def aligned(size: int) -> int:
    """Bytes up to where the next tensor of one allocation may begin, as CUDA's own allocations do."""
    return -(-size // ALIGN) * ALIGN


def check_pinned(what: str, tensors: Iterable[Tensor]) -> None:
    """Raise FatalError where one is not: CUDA graphs take copies from pinned memory alone. what: it is for."""
    lost = sum(tensor.nbytes for tensor in tensors if tensor.nbytes and not tensor.is_pinned())
    if lost:
        raise FatalError(
            f"{what}: {lost / 1e6:.1f} MB of this rank's host memory could not be pinned: raise the limit on locked "
            "memory (ulimit -l), or ask for less",
            MEMORY,
        )


def pin_memory(memory: np.ndarray) -> None:
    """Pins an array's memory until the array is gone, if the driver allows it."""
    runtime = torch.cuda.cudart()
    address = memory.ctypes.data
    if refused := int(runtime.cudaHostRegister(address, memory.nbytes, 0)):
        _forget_error()
        _warn(refused)
        return
    weakref.finalize(memory, runtime.cudaHostUnregister, address)  # before the memory is given back


def _forget_error() -> None:
    """CUDA's runtime keeps a refusal as this thread's last error, and torch would raise it at its next launch: so one
    is launched here."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")


def _limit(which: int) -> int:
    """A limit of this process in bytes; 0: there is none."""
    soft = resource.getrlimit(which)[0]
    return 0 if soft == resource.RLIM_INFINITY else soft


@functools.cache  # a model has hundreds of pieces
def _warn(refused: int) -> None:
    limit = _limit(resource.RLIMIT_MEMLOCK)
    log.warning(
        "host memory cannot be pinned (CUDA error %d%s), so copies to the GPU are slower: raise the limit on locked "
        "memory (ulimit -l), or ask for less host memory",
        refused,
        f"; {limit / 1e6:.1f} MB may be locked" if limit else "",
    )
