"""The communication backend of devices whose memory MPI cannot read: tensors go through host memory."""

from __future__ import annotations

from torch import Tensor

from .base import Comm
from .mpi import MpiComm


class HostCopiesComm(MpiComm):
    """MpiComm for tensors of any device. Those in host memory are used as they are."""

    def __init__(self, host: Comm):
        assert isinstance(host, MpiComm)
        super().__init__(host.handle)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x if self.size == 1 else x.copy_(super().all_reduce(x.cpu()))

    def all_gather(self, x: Tensor) -> Tensor:
        return super().all_gather(x.cpu()).to(x.device)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return super().reduce_scatter(x.cpu()).to(x.device)

    def all_to_allv(self, x: Tensor, counts: list[int], out: Tensor, out_counts: list[int]) -> Tensor:
        return out.copy_(super().all_to_allv(x.cpu(), counts, out.cpu(), out_counts))

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        return x if self.size == 1 else x.copy_(super().broadcast(x.cpu(), root))

    def send(self, x: Tensor, to: int) -> None:
        super().send(x.cpu(), to)

    def isend(self, x: Tensor, to: int) -> None:
        super().isend(x.cpu(), to)

    def recv(self, x: Tensor, source: int) -> Tensor:
        return x.copy_(super().recv(x.cpu(), source))
