"""A tensor group on one host: all-reduces over memory that its GPUs map of each other.

Small ones are kernels (kernels/collective/allreduce.py). Two Hoppers make those that overlap with GEMMs by DMA copies
(dma_allreduce.py). All others go over NCCL, as everything does where GPUs cannot map each other. No multicast.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from ..kernels.collective import allreduce
from ..kernels.device import device_caps
from ..kernels.gemm import gemm_reduce_scatter
from .base import Comm, Epilogue, FusedComm, Work
from .broadcast import gather_bytes
from .dma_allreduce import MAX_BYTES, REGION, DmaAllReduce, try_dma_allreduce
from .nccl import NcclComm
from .symmetric_memory import Driver, NoPeers, map_symmetric


class CustomAllReduceComm(NcclComm, FusedComm):
    """NcclComm whose sums go over mapped memory where that can be had; `why` says why it cannot, `why_not_copies` why
    copies are not among them where they should be."""

    def __init__(self, host: Comm):
        self.peers: allreduce.SymmetricMemory | None = None  # NcclComm tries a sum out
        self.why = self.why_not_copies = ""
        self._copies: DmaAllReduce | None = None
        self._agreed = False  # all ranks spread the same products
        super().__init__(host)
        if self.size == 1:
            return
        torch.cuda.current_stream().synchronize()  # makes the device's context current in this thread
        here, room = device_caps(torch.device("cuda", torch.cuda.current_device())), allreduce.region_bytes(self.size)
        # Grids have to be the same on all ranks, and so have the kinds of sums.
        mine = f"{here.num_sms} {here.hopper:d}"
        everybodys = [words.decode().split() for words in gather_bytes(host, mine.encode())]
        copied = self.size == 2 and all(hopper == "1" for _, hopper in everybodys)  # where sums begin beside products
        try:
            base, stride = map_symmetric(host, Driver(), room + REGION * copied)
        except NoPeers as error:
            self.why = str(error)
            return
        blocks = allreduce.common_blocks(int(num_sms) for num_sms, _ in everybodys)
        self.peers = allreduce.SymmetricMemory(self.rank, self.size, base, stride, blocks)
        _ = self.peers.table, self.peers.recv_buffer  # made now: not while a graph is captured
        if copied:
            self._copies, self.why_not_copies = try_dma_allreduce(host, self.peers, room)

    def agree(self) -> None:
        """From now on products begin sums, if all ranks have measured the same ones. Collective, after measuring."""
        if self.peers is None:
            return
        mine = zlib.crc32(repr(gemm_reduce_scatter.measured(self.peers.table.device)).encode())
        everybodys = self.all_gather(torch.tensor([mine], device=self.peers.table.device))
        self._agreed = bool((everybodys == mine).all())

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.peers is not None and allreduce.supports(x, self.size):
            return allreduce.all_reduce(x, self.peers)
        return super().all_reduce(x)

    def all_reduce_async(self, x: Tensor, epilogue: Epilogue | None = None) -> Work | None:
        """What the kernels take stays on the caller's stream: all of their calls have to be on one."""
        if self.peers is not None and allreduce.supports(x, self.size):
            return None
        return super().all_reduce_async(x, epilogue)

    def all_reduce_partial(self, x: Tensor) -> Tensor | None:
        if self._copies is None:
            return super().all_reduce_partial(x)
        if x.nbytes <= MAX_BYTES:
            return self._copies.exchange(x)
        for piece in x.view(-1).split(MAX_BYTES // x.itemsize):
            piece.add_(self._copies.exchange(piece))
        return None

    def all_reduce_add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """Both as one kernel."""
        if self.peers is None or not allreduce.supports_norm(x, self.size):
            return None
        return allreduce.all_reduce_add_norm(x, residual, weight, eps, self.peers)

    def gemm_all_reduce_add_norm(
        self, x: Tensor, matrix: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """The GEMM writes each rank's share of its outputs to that rank; a kernel adds up and norms."""
        peers = self.peers
        if peers is None or not self._agreed or not gemm_reduce_scatter.supports(len(x), matrix, peers):
            return None
        received = gemm_reduce_scatter.gemm_reduce_scatter(x, matrix, peers)
        return None if received is None else gemm_reduce_scatter.reduce_add_norm(received, residual, weight, eps, peers)


def agree_on_tuning(group: Comm) -> None:
    """CustomAllReduceComm.agree; nothing where a group is none."""
    if isinstance(group, CustomAllReduceComm):
        group.agree()


def symmetric_memory_of(group: Comm) -> allreduce.SymmetricMemory | None:
    """Over whom a group spreads products and sums; None where it does not."""
    return group.peers if isinstance(group, CustomAllReduceComm) else None
