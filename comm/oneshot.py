"""A tensor group on one host: small all-reduces by kernels over memory that its GPUs map of each other (CUDA IPC).

What kernels/allreduce.py does not take, and groups whose GPUs cannot reach each other, go over NCCL. No multicast.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from ..kernels import allreduce
from ..kernels.norm import add_rms_norm
from .base import Comm
from .control import gather_bytes
from .nccl import NcclComm

MARK = 16  # bytes of a slot that the ranks write and compare before they rely on what they have mapped
_TO_DEVICE, _TO_HOST = 3, 2  # cudaMemcpyKind


class NoPeers(Exception):
    """Why the group's GPUs cannot use each other's memory, in words; raised on all its ranks alike."""


class OneShotComm(NcclComm):
    """NcclComm whose small all-reduces go over mapped memory where that can be had; `why` says why it cannot."""

    def __init__(self, host: Comm):
        self.peers: allreduce.Peers | None = None  # NcclComm tries a sum out
        self.why = ""
        super().__init__(host)
        if self.size == 1:
            return
        from cupy.cuda import runtime

        runtime.setDevice(torch.cuda.current_device())  # CuPy brings a runtime of its own
        try:
            regions = map_regions(host, runtime, allreduce.region_bytes(self.size))
        except NoPeers as error:
            self.why = str(error)
        else:
            self.peers = allreduce.Peers(self.rank, torch.tensor(regions, device="cuda"))

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.peers is not None and allreduce.suits(x, self.size):
            return allreduce.all_reduce(x, self.peers)
        return super().all_reduce(x)

    def begin_all_reduce(self, x: Tensor, then: Callable[[], Any] | None = None) -> None:
        """What kernels take stays on the caller's stream: all of them have to be on one."""
        if self.peers is None or not allreduce.suits(x, self.size):
            super().begin_all_reduce(x, then)

    def all_reduce_add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """Both as one kernel; None where that does not take x."""
        if self.peers is None or not allreduce.suits(x, self.size):
            return None
        return allreduce.all_reduce_add_norm(x, residual, weight, eps, self.peers)


def all_reduce_add_norm(group: Comm, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of `residual` plus the group's sum of x, and that new residual; [T, H], both may be overwritten."""
    fused = getattr(group, "all_reduce_add_norm", None)
    done = fused(x, residual, weight, eps) if fused else None
    return done or add_rms_norm(group.all_reduce(x), residual, weight, eps)


class _Offer(msgspec.Struct):
    kernel: str  # of the operating system that the rank runs on
    bus: str  # its GPU's PCI address
    handle: bytes
    why: str


def map_regions(host: Comm, runtime: Any, size: int) -> list[int]:
    """Give `size` zeroed bytes of this rank's current GPU to the group; all ranks' regions' addresses, in rank order.

    The regions live as long as the process. runtime: cupy.cuda.runtime. Plain cudaMalloc: pieces of an allocator's
    larger blocks cannot be handed on alone. Raises NoPeers. Collective over host.
    """
    mine, offer = _offer(runtime, size, host.rank)
    offers = [msgspec.msgpack.decode(o, type=_Offer) for o in gather_bytes(host, msgspec.msgpack.encode(offer))]
    addresses: list[int] = []
    why = _refusal(offers)
    if not why:  # for all or for none
        try:
            for rank, other in enumerate(offers):
                addresses.append(mine if rank == host.rank else _open(runtime, other))
            _compare(runtime, addresses, host.rank)
        except (NoPeers, RuntimeError) as error:
            why = f"rank {host.rank} of the group: {error}"
        why = next((w.decode() for w in gather_bytes(host, why.encode()) if w), "")
    if why:
        for rank, address in enumerate(addresses):
            if rank != host.rank:
                runtime.ipcCloseMemHandle(address)
        host.barrier()  # nobody has it open any more
        if mine:
            runtime.free(mine)
        raise NoPeers(why)
    runtime.memset(mine, 0, size)
    runtime.deviceSynchronize()
    host.barrier()
    return addresses


def _offer(runtime: Any, size: int, rank: int) -> tuple[int, _Offer]:
    """A region of this rank, whose number is written at its beginning, and what the others have to know of it."""
    mine, offer = 0, _Offer("", "", b"", "")
    try:
        offer.kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        offer.bus = runtime.deviceGetPCIBusId(runtime.getDevice())
        mine = runtime.malloc(size)
        runtime.memset(mine, rank + 1, MARK)
        runtime.deviceSynchronize()
        offer.handle = runtime.ipcGetMemHandle(mine)
    except (RuntimeError, OSError) as error:
        offer.why = str(error)
    return mine, offer


def _refusal(offers: list[_Offer]) -> str:
    """What speaks against it before anything is mapped: the same on all ranks."""
    if len(offers) > allreduce.MOST_RANKS:
        return f"{len(offers)} ranks are more than {allreduce.MOST_RANKS}"
    for rank, offer in enumerate(offers):
        if offer.kernel != offers[0].kernel:
            return f"rank {rank} of the group is on another host"
        if offer.why:
            return f"rank {rank} of the group: {offer.why}"
        if offer.bus in [other.bus for other in offers[:rank]]:
            return f"two ranks of the group have the GPU {offer.bus}"
    return ""


def _open(runtime: Any, other: _Offer) -> int:
    try:
        there = runtime.deviceGetByPCIBusId(other.bus)
    except RuntimeError:
        there = -1  # not visible to this process: the driver may map it nevertheless, and will say so if it cannot
    here = runtime.getDevice()
    if there >= 0 and not runtime.deviceCanAccessPeer(here, there):
        raise NoPeers(f"GPU {runtime.deviceGetPCIBusId(here)} cannot access GPU {other.bus}")
    return runtime.ipcOpenMemHandle(other.handle)


def _compare(runtime: Any, addresses: list[int], own: int) -> None:
    """Whether what the others wrote can be copied from GPU to GPU: on some virtual machines other bytes arrive."""
    found = (ctypes.c_ubyte * MARK)()
    for rank, address in enumerate(addresses):
        aside = addresses[own] + MARK
        runtime.memcpy(aside, address, MARK, _TO_DEVICE)
        runtime.memcpy(ctypes.addressof(found), aside, MARK, _TO_HOST)
        if bytes(found) != bytes([rank + 1] * MARK):
            raise NoPeers(f"what rank {rank} wrote to its GPU does not arrive")
