"""The communication backend of CPU ranks on one host: small all-reduces go over shared memory instead of MPI."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets

import torch
from torch import Tensor

from ..kernels.collective.shm_allreduce import LINE, ShmAllReduce
from ..kernels.cpp import ops
from ..linux_calls import memory_file
from .base import Comm, FusedComm
from .broadcast import broadcast_bytes
from .mpi import MpiComm

SLOT = 1 << 16  # elements that one all-reduce can have


class ShmComm(MpiComm, FusedComm):
    """MpiComm whose small f32 all-reduces go over shared memory. `shm` is None where the ranks share none."""

    def __init__(self, host: Comm):
        assert isinstance(host, MpiComm)
        super().__init__(host.handle)
        counts = self.size * LINE
        memory = share(host, 8 * counts + 8 * self.size * SLOT, ops.available()) if self.size > 1 else None
        self.shm = None
        if memory is not None:
            slots = torch.frombuffer(memory, dtype=torch.float32, offset=8 * counts).view(2, self.size, SLOT)
            self.shm = ShmAllReduce(slots, torch.frombuffer(memory, dtype=torch.int64, count=counts), self.rank)

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.shm is None or not self.shm.fits(x):
            return super().all_reduce(x)
        assert x.is_contiguous()
        self.shm.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        if self.shm is None or not self.shm.fits(x, self.size):
            return super().all_gather(x)
        return self.shm.all_gather(x.contiguous())

    def all_reduce_add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """All-reduce and add-norm as one call into C++; None where x is too large."""
        if self.shm is None or not self.shm.fits(x):
            return None
        self.shm.all_reduce_add_norm(x, residual, weight, eps)
        return x, residual


def share(host: Comm, size: int, able: bool) -> mmap.mmap | None:
    """Zeroed memory that all ranks of the group map. Collective over host.

    None on all ranks where they are on several hosts, cannot open each other's files under /proc, or one is not
    `able`. The memory has no name: the kernel frees it when the ranks end.
    """
    secret, found, file = secrets.token_bytes(16), None, -1
    with contextlib.suppress(OSError):
        if host.rank == 0:
            file = memory_file("phalanx", size)
            os.write(file, secret)
    place = broadcast_bytes(host, secret + f"/proc/{os.getpid()}/fd/{file}".encode())
    with contextlib.suppress(OSError, ValueError):
        if host.rank > 0:
            file = os.open(place[16:], os.O_RDWR)
        found = mmap.mmap(file, size)
    able = able and found is not None and found[:16] == place[:16]
    marks = slice(16, 16 + host.size)
    if found is not None and able:
        found[16 + host.rank] = 1
    host.barrier()
    able = able and found is not None and found[marks] == b"\1" * host.size  # sees what all ranks have written
    everybody = int(host.all_reduce(torch.tensor([int(able)]))) == host.size
    if file >= 0:
        os.close(file)
    if not everybody or found is None:
        return None
    found[: marks.stop] = bytes(marks.stop)
    host.barrier()
    return found
