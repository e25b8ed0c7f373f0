"""Memory on the way between host and device that a rank's layers share, as they are computed one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ....kernels import host_memory
from ....kernels.moe.host_experts import Stack

BUFFER = 96 << 20  # bytes of a buffer of experts; there are two


class HostView:
    """A step's tokens on their way: pinned memory, and memory on the GPU that stays where it is."""

    def __init__(self, host: list[Tensor], on_device: list[Tensor], made: Tensor, out: Tensor):
        self.x, self.ids, self.weights = host
        self.on_device = on_device  # the same there
        self.made, self.out = made, out  # [T, H] f32, on the host and there
        self._sent = torch.cuda.Event()

    def send(self, *parts: Tensor) -> None:
        """x, ids and weights, from the device to the host."""
        for here, there, given in zip((self.x, self.ids, self.weights), self.on_device, parts, strict=True):
            there.copy_(given)
            here.copy_(there, non_blocking=True)

    def sent(self, _: int) -> None:
        """They are on their way: what is launched later need not be waited for."""
        self._sent.record()

    def wait(self, fresh: bool) -> None:
        """Until they are here. fresh: `sent` was not called."""
        if fresh:
            self._sent.record()
        self._sent.synchronize()


class SharedBuffers:
    """Of one rank with a GPU."""

    def __init__(self) -> None:
        self._views: dict[int, HostView] = {}
        self._rows = 0

    def view(self, x: Tensor, ids: Tensor) -> HostView:
        """For as many tokens as these."""
        if len(x) > self._rows:  # what graphs were captured with before stays theirs
            self._rows = len(x)
            self._views.clear()
            self._make(x, ids)
        if len(x) not in self._views:
            host, there, made, out = self._whole
            n = len(x)
            self._views[n] = HostView([one[:n] for one in host], [one[:n] for one in there], made[:n], out[:n])
        return self._views[len(x)]

    def _make(self, x: Tensor, ids: Tensor) -> None:
        shapes = ((*x.shape,), x.dtype), ((*ids.shape,), torch.int32), ((*ids.shape,), torch.float32)
        host = [host_memory.zeros(shape, dtype, pin=True) for shape, dtype in shapes]
        there = [torch.zeros(shape, dtype=dtype, device=x.device) for shape, dtype in shapes]
        made = host_memory.zeros((*x.shape,), torch.float32, pin=True)
        # Rows of captured steps that are padding are never filled: zeros do no harm.
        self._whole = host, there, made, torch.zeros(x.shape, dtype=torch.float32, device=x.device)


class Streamer:
    """Copies experts to the device: into two buffers in turn, by a CUDA stream of its own where it is a GPU."""

    def __init__(self, like: Stack, device: torch.device):
        """like: a layer's stack, by which the buffers are sized."""
        one = sum(x[0].nbytes for x in like)
        self.experts = max(1, min(len(like.w13), BUFFER // one))
        shapes = [(self.experts, *x.shape[1:]) for x in like]
        self._buffers = [
            Stack(*(torch.zeros(shape, dtype=like.w13.dtype, device=device) for shape in shapes)) for _ in range(2)
        ]
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None
        self._free = [torch.cuda.Event() for _ in range(2)] if cuda else []
        self._turn = 0

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for buffer in self._buffers for x in buffer)

    def copies(self, stack: Stack, experts: np.ndarray) -> Iterator[tuple[np.ndarray, Stack]]:
        """Some of the experts, and a buffer whose first ones they are; valid until the next but one."""
        for start in range(0, len(experts), self.experts):
            some = experts[start : start + self.experts]
            self._turn ^= 1
            buffer = self._buffers[self._turn]
            if self._stream is None:
                for index, expert in enumerate(some.tolist()):
                    _copy(buffer, index, stack, expert)
                yield some, buffer
                continue
            free = self._free[self._turn]
            self._stream.wait_event(free)
            with torch.cuda.stream(self._stream):
                for index, expert in enumerate(some.tolist()):
                    _copy(buffer, index, stack, expert)
            torch.cuda.current_stream().wait_stream(self._stream)
            yield some, buffer
            free.record()

    def replace(self, slots: Stack, slot: int, stack: Stack, expert: int) -> torch.cuda.Event | None:
        """Copy an expert into a slot that nothing launched later reads. When it is there; None: it is."""
        if self._stream is None:
            _copy(slots, slot, stack, expert)
            return None
        self._stream.wait_stream(torch.cuda.current_stream())
        done = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            _copy(slots, slot, stack, expert)
            done.record()
        return done


def _copy(target: Stack, index: int, source: Stack, expert: int) -> None:
    for mine, theirs in zip(target, source, strict=True):
        mine[index].copy_(theirs[expert], non_blocking=True)
