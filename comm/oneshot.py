"""A tensor group on one host: small all-reduces by kernels over memory that its GPUs map of each other.

What kernels/allreduce.py does not take, and groups whose GPUs cannot reach each other, go over NCCL. No multicast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..kernels import allreduce
from ..kernels.norm import add_rms_norm
from .base import Comm
from .mapped import Driver, NoPeers, map_regions
from .nccl import NcclComm


class OneShotComm(NcclComm):
    """NcclComm whose small all-reduces go over mapped memory where that can be had; `why` says why it cannot."""

    def __init__(self, host: Comm):
        self.peers: allreduce.Peers | None = None  # NcclComm tries a sum out
        self.why = ""
        super().__init__(host)
        if self.size == 1:
            return
        torch.cuda.current_stream().synchronize()  # makes the device's context current in this thread
        try:
            base, stride = map_regions(host, Driver(), allreduce.region_bytes(self.size))
        except NoPeers as error:
            self.why = str(error)
        else:
            table = torch.tensor([base + r * stride for r in range(self.size)], device="cuda")
            self.peers = allreduce.Peers(self.rank, table)

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
