"""The interface of a communication backend. Layers, loader and sampler know this protocol and no backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from ..kernels.norm.norm import add_rms_norm

Epilogue = Callable[[Tensor | None], Any]


class Work(Protocol):
    """An all-reduce under way."""

    def wait(self) -> Any:
        """Make the caller's stream wait for the all-reduce. Returns the epilogue's result, or the sum where there is no
        epilogue. Call it once."""


class Comm(Protocol):
    """A group of ranks that exchange tensors. Every member calls the same collectives in the same order.

    Tensors are contiguous. On GPUs a collective runs on the current CUDA stream, in the order of the calls. On CPUs it
    has completed when the call returns.
    """

    rank: int  # of this process within the group
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of x over the group, in place; returns x. Ranks may differ in the last bit, so one rank makes decisions
        that depend on it."""

    def all_reduce_async(self, x: Tensor, epilogue: Epilogue | None = None) -> Work | None:
        """Start an all-reduce of x and the `epilogue` that follows it; both overlap with what the caller computes.

        Returns None where nothing was started: this backend cannot overlap, or a plain all-reduce of x is faster.

        Until `Work.wait`, the caller must not touch what the two read and write. The group's only other collectives
        are async all-reduces, started and waited for in the same order on all ranks. The epilogue works in place; on
        GPUs it runs on another CUDA stream. Its argument is the part of the sum that is still to be added to x, in x's
        shape: a kernel that reads x anyway adds it at less cost. None means that x is the sum. The epilogue must not
        keep the argument.
        """

    def all_gather(self, x: Tensor) -> Tensor:
        """[size, *x.shape]: every rank's x, in rank order."""

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """x is [size, ...]; returns this rank's slice [...] of the sum."""

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        """root's x to all, in place; returns x."""

    def send(self, x: Tensor, to: int) -> None: ...

    def isend(self, x: Tensor, to: int) -> None:
        """`send` that does not wait for the receiver. x must not be changed afterwards.

        Use it for messages against the direction of the activations: a blocking send there could deadlock with one
        that waits for this rank."""

    def recv(self, x: Tensor, source: int) -> Tensor:
        """Fill x from `source`; returns x."""

    def barrier(self) -> None: ...

    def split(self, color: int, key: int) -> Comm:
        """The subgroup of the ranks that pass the same color, ordered by key. Collective over this group."""


class Alone:
    """A group of one rank."""

    rank, size = 0, 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_reduce_async(self, x: Tensor, epilogue: Epilogue | None = None) -> None:
        return None

    def all_gather(self, x: Tensor) -> Tensor:
        return x[None]

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x[0]

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        return x

    def send(self, x: Tensor, to: int) -> None:
        raise AssertionError("there is no other rank")

    isend = send

    def recv(self, x: Tensor, source: int) -> Tensor:
        raise AssertionError("there is no other rank")

    def barrier(self) -> None: ...

    def split(self, color: int, key: int) -> Alone:
        return self


class FusedComm:
    """A group with kernels that fuse an all-reduce with the operations next to it.

    Each method may decline: it returns None and has done nothing. Callers test for this class, not for a backend:
    the MPI backend cannot be imported where there is no MPI.
    """

    def all_reduce_add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """Add the group's sum of x to `residual`. Returns the RMS norm of that and the new residual, both [T, H]. x and
        residual may be overwritten."""
        raise NotImplementedError

    def gemm_all_reduce_add_norm(
        self, x: Tensor, matrix: Tensor, residual: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """`all_reduce_add_norm` of the GEMM of x [T, I] and the transpose of matrix [H, I], plus bias [H], which one of
        the ranks adds. All ranks decline, or none."""
        return None


def all_reduce_add_norm(group: Comm, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """FusedComm.all_reduce_add_norm for any group."""
    done = group.all_reduce_add_norm(x, residual, weight, eps) if isinstance(group, FusedComm) else None
    return done or add_rms_norm(group.all_reduce(x), residual, weight, eps)


class HostComm(Comm, Protocol):
    """A group whose tensors are in host memory."""

    def all_to_allv(self, x: Tensor, counts: list[int], out: Tensor, out_counts: list[int]) -> Tensor:
        """x [sum of counts] has counts[i] elements for rank i, one rank after the other; returns out, filled the same
        way with out_counts[i] elements from rank i. Fewer than 2^31 elements on either side."""

    def split(self, color: int, key: int) -> HostComm: ...

    def subgroup(self, ranks: Sequence[int]) -> HostComm:
        """The group of these ranks, in their order. Collective over them alone: the others take no part."""
