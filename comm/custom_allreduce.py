"""The communication backend of GPUs on one host: all-reduces over symmetric memory, without multicast.

Small all-reduces are kernels (kernels/collective/allreduce.py). Two Hopper GPUs overlap large ones with GEMMs by DMA
copies (dma_allreduce.py). NCCL makes all others, and everything where the GPUs cannot map each other's memory.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from ..kernels.collective import allreduce, allreduce_norm
from ..kernels.device import device_caps
from ..kernels.gemm import gemm_reduce_scatter
from .base import Comm, Epilogue, FusedComm, Work
from .broadcast import gather_bytes
from .dma_allreduce import MAX_BYTES, REGION, DmaAllReduce, try_dma_allreduce
from .nccl import NcclComm
from .symmetric_memory import Driver, NoPeers, map_symmetric


class CustomAllReduceComm(NcclComm, FusedComm):
    """NcclComm whose all-reduces go over symmetric memory where the GPUs allow it.

    `why`: the reason why there is no symmetric memory. `why_not_dma`: the reason why DMA copies failed where they were
    expected.
    """

    def __init__(self, host: Comm):
        self.peers: allreduce.SymmetricMemory | None = None  # set before NcclComm.__init__, which runs an all-reduce
        self.why = self.why_not_dma = ""
        self._dma: DmaAllReduce | None = None
        self._agreed = False  # all ranks have chosen the same GEMM + reduce-scatter kernels
        super().__init__(host)
        if self.size == 1:
            return
        torch.cuda.current_stream().synchronize()  # makes the device's context current in this thread
        here, room = device_caps(torch.device("cuda", torch.cuda.current_device())), allreduce.region_bytes(self.size)
        # All ranks need the same grids and the same choice of algorithms.
        mine = f"{here.num_sms} {here.hopper:d}"
        everybodys = [words.decode().split() for words in gather_bytes(host, mine.encode())]
        # Two Hopper GPUs overlap all-reduces with GEMMs.
        use_dma = self.size == 2 and all(hopper == "1" for _, hopper in everybodys)
        try:
            base, stride = map_symmetric(host, Driver(), room + REGION * use_dma)
        except NoPeers as error:
            self.why = str(error)
            return
        blocks = allreduce.common_blocks(int(num_sms) for num_sms, _ in everybodys)
        self.peers = allreduce.SymmetricMemory(self.rank, self.size, base, stride, blocks)
        _ = self.peers.table, self.peers.recv_buffer  # allocated now: not while a CUDA graph is captured
        if use_dma:
            self._dma, self.why_not_dma = try_dma_allreduce(host, self.peers, room)

    def agree(self) -> None:
        """Allow fused GEMM + all-reduce from now on, if all ranks have tuned to the same kernels. Collective; call it
        after tuning."""
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
        """None for sizes that the kernels support: all of their calls have to be on one CUDA stream."""
        if self.peers is not None and allreduce.supports(x, self.size):
            return None
        return super().all_reduce_async(x, epilogue)

    def all_reduce_partial(self, x: Tensor) -> Tensor | None:
        if self._dma is None:
            return super().all_reduce_partial(x)
        if x.nbytes <= MAX_BYTES:
            return self._dma.exchange(x)
        for chunk in x.view(-1).split(MAX_BYTES // x.itemsize):
            chunk.add_(self._dma.exchange(chunk))
        return None

    def all_reduce_add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """All-reduce and add-norm as one kernel."""
        if self.peers is None or not allreduce_norm.supports(x, self.size):
            return None
        return allreduce_norm.all_reduce_add_norm(x, residual, weight, eps, self.peers)

    def gemm_all_reduce_add_norm(
        self, x: Tensor, matrix: Tensor, residual: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """The GEMM writes each rank's share of its outputs to that rank; a kernel adds up and norms."""
        peers = self.peers
        if peers is None or not self._agreed or not gemm_reduce_scatter.supports(len(x), matrix, peers):
            return None
        received = gemm_reduce_scatter.gemm_reduce_scatter(x, matrix, peers, bias)
        return None if received is None else gemm_reduce_scatter.reduce_add_norm(received, residual, weight, eps, peers)


def agree_on_tuning(group: Comm) -> None:
    """Call CustomAllReduceComm.agree; do nothing for other backends."""
    if isinstance(group, CustomAllReduceComm):
        group.agree()


def symmetric_memory_of(group: Comm) -> allreduce.SymmetricMemory | None:
    """The group's symmetric memory, over which fused GEMMs reduce-scatter; None where it has none."""
    return group.peers if isinstance(group, CustomAllReduceComm) else None
