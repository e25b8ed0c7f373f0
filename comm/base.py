"""What a communication backend offers. Layers, loader and sampler know this protocol and no backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from ..kernels.norm.norm import add_rms_norm

Epilogue = Callable[[Tensor | None], Any]


class Work(Protocol):
    """An all-reduce under way."""

    def wait(self) -> Any:
        """Let the caller's stream wait for it. What the epilogue has returned; without one the sum. Called once."""


class Comm(Protocol):
    """A group of ranks that exchange tensors. Every member calls the same collectives in the same order.

    Tensors are contiguous. Collectives run in the caller's order on the backend's stream: on GPUs the current
    CUDA stream, on CPUs they have completed on return.
    """

    rank: int  # of this process within the group
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of x over the group, in place; returns x. Ranks may differ in the last bit: one rank decides for all."""

    def all_reduce_async(self, x: Tensor, epilogue: Epilogue | None = None) -> Work | None:
        """Begin the sum of x, and the `epilogue` that follows it, beside what the caller computes; None: nothing has
        begun, as this backend has nothing that computes beside the caller, or as x is summed faster without.

        Until the work is waited for, the caller leaves alone what both read and write, and the group's only other
        collectives are async all-reduces, begun and waited for in the same order on all ranks. The epilogue works in
        place; on GPUs it runs on another stream. It gets what is still to be added to x, of x's shape, as that is
        cheaper for a kernel that reads x anyway, and does not keep it; None: x is the sum.
        """

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
    """A group that has faster ways than Comm's for a sum and what stands beside it; each may decline with None, and
    has done nothing then.

    Callers ask for this by isinstance and for no backend: MPI's cannot be imported where there is no MPI.
    """

    def all_reduce_add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """The RMS norm of `residual` plus the group's sum of x, and that new residual, [T, H]; both may be
        overwritten."""
        raise NotImplementedError

    def gemm_all_reduce_add_norm(
        self, x: Tensor, matrix: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """The same of x [T, I] times the transpose of matrix [H, I]."""
        return None


def all_reduce_add_norm(group: Comm, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """FusedComm.all_reduce_add_norm for any group."""
    done = group.all_reduce_add_norm(x, residual, weight, eps) if isinstance(group, FusedComm) else None
    return done or add_rms_norm(group.all_reduce(x), residual, weight, eps)


class HostComm(Comm, Protocol):
    """A group whose tensors are in the host's memory."""

    def all_to_allv(self, x: Tensor, counts: list[int], out: Tensor, out_counts: list[int]) -> Tensor:
        """x [sum of counts] has counts[i] elements for rank i, one rank after the other; returns out, filled the same
        way with out_counts[i] elements from rank i. Fewer than 2^31 elements on either side."""

    def split(self, color: int, key: int) -> HostComm: ...
