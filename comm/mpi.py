"""Ranks as MPI processes, with CPU tensors. MPI is initialised here and nowhere else (`join`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import mpi4py
import torch
from torch import Tensor

from .base import Epilogue

mpi4py.rc(initialize=False, finalize=False)  # before mpi4py.MPI is imported: join() initialises
from mpi4py import MPI  # noqa: E402

_AS_BYTES = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.bool: torch.uint8}


def _buffer(x: Tensor) -> Any:
    """x's memory as numpy. MPI does not know the two-byte floats: they go as integers of their size."""
    if not x.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(x.shape)} and strides {x.stride()} is not contiguous")
    return x.view(_AS_BYTES.get(x.dtype, x.dtype)).numpy()


class MpiComm:
    """The HostComm protocol (comm/base.py) over an mpi4py communicator."""

    def __init__(self, handle: MPI.Intracomm):
        self.handle = handle
        self._posted: list[tuple[Any, Tensor]] = []  # pending isends with their tensors, which must live until then
        self.rank = handle.Get_rank()
        self.size = handle.Get_size()

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.size == 1:
            return x
        if x.dtype in _AS_BYTES:  # summed in float32, as the GPU kernels do
            return x.copy_(self.all_reduce(x.float()))
        self.handle.Allreduce(MPI.IN_PLACE, _buffer(x))
        return x

    def all_reduce_async(self, x: Tensor, epilogue: Epilogue | None = None) -> None:
        """None: nothing overlaps with the calling thread."""

    def all_gather(self, x: Tensor) -> Tensor:
        out = x.new_empty((self.size, *x.shape))
        self.handle.Allgather(_buffer(x), _buffer(out))
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        if x.dtype in _AS_BYTES:
            return self.reduce_scatter(x.float()).to(x.dtype)
        out = x.new_empty(x.shape[1:])
        self.handle.Reduce_scatter_block(_buffer(x), _buffer(out))
        return out

    def all_to_allv(self, x: Tensor, counts: list[int], out: Tensor, out_counts: list[int]) -> Tensor:
        self.handle.Alltoallv([_buffer(x), counts], [_buffer(out), out_counts])
        return out

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        if self.size > 1:
            self.handle.Bcast(_buffer(x), root)
        return x

    def send(self, x: Tensor, to: int) -> None:
        self.handle.Send(_buffer(x), to)

    def isend(self, x: Tensor, to: int) -> None:
        self._posted = [(request, kept) for request, kept in self._posted if not request.Test()]
        self._posted.append((self.handle.Isend(_buffer(x), to), x))

    def recv(self, x: Tensor, source: int) -> Tensor:
        self.handle.Recv(_buffer(x), source)
        return x

    def barrier(self) -> None:
        self.handle.Barrier()

    def split(self, color: int, key: int) -> MpiComm:
        part = self.handle.Split(color, key)
        assert isinstance(part, MPI.Intracomm)
        return MpiComm(part)

    def subgroup(self, ranks: Sequence[int]) -> MpiComm:
        return MpiComm(self.handle.Create_group(self.handle.Get_group().Incl(list(ranks))))


class MpiResultChannel:
    """Bytes from rank 1 of a group to its rank 0, in order. It has a communicator of its own."""

    def __init__(self, group: MpiComm):
        self._handle = group.handle.Dup()

    def send(self, data: bytes) -> None:
        """May block until rank 0 calls collect."""
        self._handle.Send([data, MPI.BYTE], 0)

    def collect(self) -> list[bytes]:
        """Rank 0: the messages that have arrived."""
        found = []
        status = MPI.Status()
        while (message := self._handle.Improbe(1, status=status)) is not None:
            data = bytearray(status.Get_count(MPI.BYTE))
            message.Recv([data, MPI.BYTE])
            found.append(bytes(data))
        return found


def join(announced_size: int) -> MpiComm:
    """Initialise MPI and return the world. announced_size: ranks by the launcher's environment; 0: unknown.

    Raises RuntimeError where the world has another size: mpirun and mpi4py then belong to different MPI libraries, and
    every process would be rank 0 of a job of its own. Raises it too where the library lacks MPI_THREAD_MULTIPLE: the
    step thread sends tensors while the main thread sends plans.
    """
    provided = _initialise()
    world = MPI.COMM_WORLD
    if announced_size not in (0, world.Get_size()):
        vendor, version = MPI.get_vendor()
        raise RuntimeError(
            f"started as one of {announced_size} ranks, but MPI sees {world.Get_size()}: the launcher and the MPI that "
            f"mpi4py loaded ({vendor} {'.'.join(map(str, version))}) do not belong together. Start with that MPI's own "
            "mpirun, or with srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH); MPI4PY_LIBMPI chooses the library"
        )
    if provided < MPI.THREAD_MULTIPLE:
        raise RuntimeError(
            f"{library()} offers thread level {provided}, Phalanx needs MPI_THREAD_MULTIPLE ({MPI.THREAD_MULTIPLE})"
        )
    return MpiComm(world)


def _initialise() -> int:
    """Call MPI_Init_thread; returns the thread level.

    The call goes through ctypes, which releases the interpreter lock. mpi4py's own call keeps it, so no other thread
    could report that a rank is missing.
    """
    try:
        init = ctypes.CDLL(MPI.__file__).MPI_Init_thread
    except (OSError, AttributeError):  # mpi4py was built without a shared libmpi
        return MPI.Init_thread(MPI.THREAD_MULTIPLE)
    provided = ctypes.c_int()
    init(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(provided))
    MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)  # as mpi4py does: errors become exceptions
    return provided.value


def library() -> str:
    """The MPI library's own name and version, one line."""
    return MPI.Get_library_version().splitlines()[0].strip(" ,\0")


def abort(code: int) -> None:
    """End every rank; the launcher ends with `code`."""
    MPI.COMM_WORLD.Abort(code)


def leave() -> None:
    """Finalise MPI. Collective; the last call of a rank that ends normally."""
    MPI.Finalize()
