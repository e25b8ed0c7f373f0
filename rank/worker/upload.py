"""Copies a step's arrays from the host to the device, in one asynchronous copy, and results back."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

RING = 8  # pinned buffers; with more steps in flight, as from eight pipeline stages on, an upload waits for the oldest
FIRST = 1 << 19  # bytes of a buffer: to pin more takes milliseconds, and 8192 tokens of prompts fit
ALIGN = 16


class Upload:
    """One rank's upload buffers. On a CPU it uses the arrays as they are, without a copy; only GPUs of CUDA's have
    buffers."""

    def __init__(self, device: torch.device):
        self.device = device
        self._buffers: list[Tensor] = []
        self._copied: list[torch.cuda.Event] = []
        self._next = 0

    def send(self, arrays: list[np.ndarray]) -> list[Tensor]:
        """The arrays as tensors on the device, in newly allocated memory."""
        if self.device.type != "cuda":
            return [torch.from_numpy(np.ascontiguousarray(a)).to(self.device) for a in arrays]
        starts = np.cumsum([0] + [-(-a.nbytes // ALIGN) * ALIGN for a in arrays]).tolist()
        room = torch.empty(max(starts[-1], ALIGN), dtype=torch.uint8, device=self.device)
        host = self._host(len(room))
        for array, start in zip(arrays, starts, strict=False):
            host[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
        self._copy(room)
        kinds = [torch.from_numpy(a[:0]).dtype for a in arrays]
        return [
            room[start : start + a.nbytes].view(kind).view(a.shape)
            for a, start, kind in zip(arrays, starts, kinds, strict=False)
        ]

    def fill(self, target: Tensor, parts: list[np.ndarray]) -> None:
        """Copy the parts, all of target's dtype, one after the other to the beginning of `target`. GPUs only."""
        count = sum(p.size for p in parts)
        host = self._host(count * target.element_size()).view(parts[0].dtype)
        np.concatenate([p.reshape(-1) for p in parts], out=host)
        self._copy(target[:count])

    def _host(self, size: int) -> np.ndarray:
        """`size` bytes of a pinned buffer that no running copy reads."""
        if not self._buffers:
            self._buffers = [torch.empty(FIRST, dtype=torch.uint8, pin_memory=True) for _ in range(RING)]
            self._copied = [torch.cuda.Event() for _ in range(RING)]
        self._next = (self._next + 1) % RING
        self._copied[self._next].synchronize()
        if len(self._buffers[self._next]) < size:
            room = 1 << (size - 1).bit_length()
            self._buffers[self._next] = torch.empty(room, dtype=torch.uint8, pin_memory=True)
        return self._buffers[self._next].numpy()[:size]

    def _copy(self, target: Tensor) -> None:
        source = self._buffers[self._next][: target.nbytes].view(target.dtype)
        target.view(-1).copy_(source, non_blocking=True)
        self._copied[self._next].record()


def to_host(x: Tensor) -> Tensor:
    """x in host memory: from a GPU an asynchronous copy into pinned memory, complete once the CUDA stream is there."""
    if not x.is_cuda:
        return x.cpu()
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
