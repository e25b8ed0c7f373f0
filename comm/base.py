"""What a communication backend offers. Layers, loader and sampler know this protocol and no backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from ..kernels.board import Board

Then = Callable[[Tensor | None], Any]  # what follows a sum


class Comm(Protocol):
    """A group of ranks that exchange tensors. Every member calls the same collectives in the same order.

    Tensors are contiguous. Collectives run in the caller's order on the backend's stream: on GPUs the current
    CUDA stream, on CPUs they have completed on return.
    """

    rank: int  # of this process within the group
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of x over the group, in place; returns x. Ranks may differ in the last bit: one rank decides for all."""

    def begin_all_reduce(self, x: Tensor, then: Then | None = None) -> None:
        """The sum of x, and `then` what follows it, may begin now, beside what the caller computes.

        end_all_reduce ends it, or all_reduce where nothing follows. Until then what they read and write is neither
        touched nor given up, and the group's only other collectives are sums that begin or end like this one, in the
        same order on all ranks. `then` works in place: on GPUs it runs on another stream. It gets what is still to be
        added to x, of x's shape, as that is cheaper for who reads x anyway, and does not keep it; None: x is the sum.
        """

    def end_all_reduce(self, x: Tensor) -> Any:
        """What `then` has returned, or x where nothing follows. None: the sum has not begun."""

    def all_gather(self, x: Tensor) -> Tensor:
        """[size, *x.shape]: every rank's x, in rank order."""

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """x is [size, ...]; returns this rank's slice [...] of the sum."""

    def all_to_all(self, x: Tensor) -> Tensor:
        """x is [size, ...]; slice i goes to rank i; returns [size, ...], slice i came from rank i."""

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        """root's x to all, in place; returns x."""

    def send(self, x: Tensor, to: int) -> None: ...

    def post(self, x: Tensor, to: int) -> None:
        """As `send`, but nothing waits for the receiver: for what flows against the tensors' direction, where a send
        that waits could meet another that waits for this rank. x must not be changed afterwards."""

    def recv(self, x: Tensor, source: int) -> Tensor:
        """Fill x from `source`; returns x."""

    def barrier(self) -> None: ...

    def split(self, color: int, key: int) -> Comm:
        """The subgroup of the ranks that pass the same color, ordered by key. Collective over this group."""


class FusedComm:
    """A group that can make a sum and the norm after it as one, besides what Comm has.

    Callers ask for this by isinstance and for no backend: MPI's cannot be imported where there is no MPI.
    """

    board: Board | None = None  # over which compiled halves of a layer add up themselves: kernels/halves.py

    def all_reduce_add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """As oneshot.all_reduce_add_norm; None, and nothing has been done, where x is not for it."""
        raise NotImplementedError


class HostComm(Comm, Protocol):
    """A group whose tensors are in the host's memory."""

    def all_to_allv(self, x: Tensor, counts: list[int], out: Tensor, out_counts: list[int]) -> Tensor:
        """x [sum of counts] has counts[i] elements for rank i, one rank after the other; returns out, filled the same
        way with out_counts[i] elements from rank i. Fewer than 2^31 elements on either side."""

    def split(self, color: int, key: int) -> HostComm: ...
