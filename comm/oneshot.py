"""A tensor group on one host: all-reduces over memory that its GPUs map of each other.

Small ones by kernels (kernels/allreduce.py), of two Hoppers those beside products by copies (copies.py), the others
over NCCL, as all are where GPUs cannot reach each other. No multicast.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from ..kernels import allreduce, spread
from ..kernels.chip import chip
from ..kernels.norm import add_rms_norm
from .base import Comm, FusedComm, Then
from .control import gather_bytes
from .copies import MOST, REGION, Copies, carried
from .mapped import Driver, NoPeers, map_regions
from .nccl import NcclComm


class OneShotComm(NcclComm, FusedComm):
    """NcclComm whose sums go over mapped memory where that can be had; `why` says why it cannot, `why_not_copies` why
    copies are not among them where they should be."""

    def __init__(self, host: Comm):
        self.peers: allreduce.Peers | None = None  # NcclComm tries a sum out
        self.why = self.why_not_copies = ""
        self._copies: Copies | None = None
        self._landing = 0  # the address of a product whose sum has not ended
        self._agreed = False  # all ranks spread the same products
        super().__init__(host)
        if self.size == 1:
            return
        torch.cuda.current_stream().synchronize()  # makes the device's context current in this thread
        here, room = chip(torch.device("cuda", torch.cuda.current_device())), allreduce.region_bytes(self.size)
        # Grids have to be the same on all ranks, and so have the kinds of sums.
        mine = f"{here.processors} {here.hopper:d}"
        everybodys = [words.decode().split() for words in gather_bytes(host, mine.encode())]
        copied = self.size == 2 and all(hopper == "1" for _, hopper in everybodys)  # where sums begin beside products
        try:
            base, stride = map_regions(host, Driver(), room + REGION * copied)
        except NoPeers as error:
            self.why = str(error)
            return
        blocks = allreduce.common_blocks(int(processors) for processors, _ in everybodys)
        self.peers = allreduce.Peers(self.rank, self.size, base, stride, blocks)
        _ = self.peers.table, self.peers.landing  # made now: not while a graph is captured
        if copied:
            self._copies, self.why_not_copies = carried(host, self.peers, room)

    def agree(self) -> None:
        """From now on products begin sums, if all ranks have measured the same ones. Collective, after measuring."""
        if self.peers is None:
            return
        mine = zlib.crc32(repr(spread.measured(self.peers.table.device)).encode())
        everybodys = self.all_gather(torch.tensor([mine], device=self.peers.table.device))
        self._agreed = bool((everybodys == mine).all())

    def product(self, x: Tensor, weight: Tensor) -> Tensor | None:
        """x [T, I] times the transpose of weight [O, I], whose sum over the group begins with it: [T, O] for
        all_reduce_add_norm or all_reduce, which end it. None: nothing has begun."""
        if self.peers is None or not self._agreed or self._landing or not spread.suits(len(x), weight, self.peers):
            return None
        y = spread.product(x, weight, self.peers)
        self._landing = y.data_ptr() if y is not None else 0
        return y

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._landed(x):  # the sum cannot be where parts of it still arrive
            whole = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
            return self._end(x, whole, whole[0], 0.0)[1]
        if self.peers is not None and allreduce.suits(x, self.size):
            return allreduce.all_reduce(x, self.peers)
        return super().all_reduce(x)

    def begin_all_reduce(self, x: Tensor, then: Then | None = None) -> None:
        """What kernels take stays on the caller's stream: all of them have to be on one. What a product has begun
        ends where it is waited for."""
        if self._landed(x):
            return
        if self.peers is None or not allreduce.suits(x, self.size):
            super().begin_all_reduce(x, then)

    def sum_up(self, x: Tensor) -> Tensor | None:
        if self._copies is None:
            return super().sum_up(x)
        if x.nbytes <= MOST:
            return self._copies.exchange(x)
        for piece in x.view(-1).split(MOST // x.itemsize):
            piece.add_(self._copies.exchange(piece))
        return None

    def all_reduce_add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """Both as one kernel; None where that does not take x."""
        if self._landed(x):
            return self._end(x, residual, weight, eps)
        if self.peers is None or not allreduce.suits_norm(x, self.size):
            return None
        return allreduce.all_reduce_add_norm(x, residual, weight, eps, self.peers)

    def _landed(self, x: Tensor) -> bool:
        """Whether x is what the last product has returned."""
        return bool(self._landing) and x.data_ptr() == self._landing

    def _end(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        assert self.peers is not None
        self._landing = 0
        return spread.add_norm(x, residual, weight, eps, self.peers)


def agree(group: Comm) -> None:
    """OneShotComm.agree; nothing where a group is none."""
    if isinstance(group, OneShotComm):
        group.agree()


def peers_of(group: Comm) -> allreduce.Peers | None:
    """Over whom a group spreads products and sums; None where it does not."""
    return group.peers if isinstance(group, OneShotComm) else None


def begin_product(group: Comm, x: Tensor, weight: Tensor) -> Tensor | None:
    """What OneShotComm.product returns; None where a group is none."""
    return group.product(x, weight) if isinstance(group, OneShotComm) else None


def all_reduce_add_norm(group: Comm, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of `residual` plus the group's sum of x, and that new residual; [T, H], both may be overwritten."""
    done = group.all_reduce_add_norm(x, residual, weight, eps) if isinstance(group, FusedComm) else None
    return done or add_rms_norm(group.all_reduce(x), residual, weight, eps)
