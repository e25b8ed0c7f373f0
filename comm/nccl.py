"""GPU tensors over NCCL, through CuPy. The host communicator broadcasts the unique id of each NCCL communicator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import errors
from ..kernels.device import current_stream
from .base import Comm, Epilogue, Work
from .broadcast import broadcast_bytes


def _nccl() -> Any:
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise errors.FatalError(
            f"several GPUs need CuPy with NCCL ({error}): `make install TORCH=cuda`, or `pip install phalanx[gpu]`; or "
            "use one GPU, or --device cpu",
            errors.USAGE,
        ) from None
    return nccl


class NcclWork:
    """An all-reduce on a CUDA stream of its own."""

    def __init__(self, event: torch.cuda.Event, x: Tensor, result: Any):
        self._event, self._x, self._result = event, x, result  # x must live until the CUDA stream has waited

    def wait(self) -> Any:
        torch.cuda.current_stream().wait_event(self._event)
        return self._result


class NcclComm:
    """The Comm protocol (comm/base.py) on torch's current CUDA stream. Collective over `host`: made by every member."""

    def __init__(self, host: Comm):
        self.host = host
        self.rank = host.rank
        self.size = host.size
        self._nccl = None
        self._aside: torch.cuda.Stream | None = None  # the CUDA stream on which `isend` waits for the receiver
        self._side_stream: torch.cuda.Stream | None = None  # the CUDA stream of async all-reduces
        if self.size > 1:
            nccl = _nccl()
            mine = bytes(b & 0xFF for b in nccl.get_unique_id()) if self.rank == 0 else b""
            unique = broadcast_bytes(host, mine)
            self._nccl = nccl.NcclCommunicator(self.size, unique, self.rank)
            self._kinds = {
                torch.float32: nccl.NCCL_FLOAT32,
                torch.float16: nccl.NCCL_FLOAT16,
                torch.bfloat16: nccl.NCCL_BFLOAT16,
                torch.int64: nccl.NCCL_INT64,
                torch.int32: nccl.NCCL_INT32,
                torch.uint8: nccl.NCCL_UINT8,
            }
            self._sum = nccl.NCCL_SUM
            self._warm()

    def _warm(self) -> None:
        """NCCL connects lazily, which must not happen while a CUDA graph is captured."""
        x = torch.zeros(self.size, device="cuda")
        self.all_reduce(x)
        self.all_gather(x)
        torch.cuda.current_stream().synchronize()

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._nccl is not None:
            self._nccl.allReduce(
                x.data_ptr(), x.data_ptr(), x.numel(), self._kinds[x.dtype], self._sum, current_stream()
            )
        return x

    def all_reduce_async(self, x: Tensor, epilogue: Epilogue | None = None) -> Work | None:
        """Runs on a CUDA stream of its own. x needs no record_stream: it is freed on the current CUDA stream, which
        has waited by then."""
        if self._nccl is None:
            return None
        if self._side_stream is None:
            self._side_stream = torch.cuda.Stream(priority=-1)  # its few blocks go before a GEMM's many
        self._side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side_stream):
            rest = self.all_reduce_partial(x)
            result = epilogue(rest) if epilogue else x if rest is None else x.add_(rest)
        return NcclWork(self._side_stream.record_event(), x, result)

    def all_reduce_partial(self, x: Tensor) -> Tensor | None:
        """All-reduce x in place, for `all_reduce_async`. A subclass may return the part still to be added to x."""
        self.all_reduce(x)
        return None

    def all_gather(self, x: Tensor) -> Tensor:
        if self._nccl is None:
            return x[None].clone()
        out = x.new_empty((self.size, *x.shape))
        self._nccl.allGather(x.data_ptr(), out.data_ptr(), x.numel(), self._kinds[x.dtype], current_stream())
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        if self._nccl is None:
            return x[0].clone()
        out = x.new_empty(x.shape[1:])
        self._nccl.reduceScatter(
            x.data_ptr(), out.data_ptr(), out.numel(), self._kinds[x.dtype], self._sum, current_stream()
        )
        return out

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        if self._nccl is not None:
            self._nccl.broadcast(x.data_ptr(), x.data_ptr(), x.numel(), self._kinds[x.dtype], root, current_stream())
        return x

    def send(self, x: Tensor, to: int) -> None:
        assert self._nccl is not None
        self._nccl.send(x.data_ptr(), x.numel(), self._kinds[x.dtype], to, current_stream())

    def isend(self, x: Tensor, to: int) -> None:
        if self._aside is None:
            self._aside = torch.cuda.Stream()
        self._aside.wait_stream(torch.cuda.current_stream())
        x.record_stream(self._aside)
        with torch.cuda.stream(self._aside):
            self.send(x, to)

    def recv(self, x: Tensor, source: int) -> Tensor:
        assert self._nccl is not None
        self._nccl.recv(x.data_ptr(), x.numel(), self._kinds[x.dtype], source, current_stream())
        return x

    def barrier(self) -> None:
        """Returns once all members have finished what they queued before."""
        torch.cuda.current_stream().synchronize()
        self.host.barrier()

    def split(self, color: int, key: int) -> NcclComm:
        return NcclComm(self.host.split(color, key))
