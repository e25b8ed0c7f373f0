"""Capabilities of a GPU, asked once."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch

# Bytes of shared memory:
WHOLE_SHARED = 220 << 10  # for a block alone on a multiprocessor: a few small ones of other kernels fit beside it
HALF_SHARED = 115_400  # for each of two blocks on a multiprocessor that has 228 KB


class DeviceCaps(NamedTuple):
    num_sms: int
    arch: str  # for compilers
    has_pdl: bool  # kernels may start before their predecessors have ended
    has_tma: bool  # and shared memory enough for its tiles; from sm_120 on there is half as much
    hopper: bool  # asynchronous tensor-core instructions that no other generation has

    @property
    def has_clusters(self) -> bool:
        """Whether blocks of a cluster read each other's shared memory: the same generations."""
        return self.has_pdl


@functools.cache
def device_caps(device: torch.device) -> DeviceCaps:
    found = torch.cuda.get_device_properties(device)
    hopper, has_pdl = (found.major, found.minor) == (9, 0), found.major >= 9
    arch = f"sm_{found.major}{found.minor}" + "a" * hopper
    room = found.shared_memory_per_multiprocessor >= 2 * (HALF_SHARED + 1024)
    return DeviceCaps(found.multi_processor_count, arch, has_pdl, has_pdl and room, hopper)


def current_stream() -> int:
    """The handle of torch's current CUDA stream, on the current device.

    torch.cuda.current_stream() makes an object, for which it looks up the device and the environment in Python. Triton
    and Inductor ask for streams like this, torch.cuda.current_device() for devices.
    """
    return torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())


def upload(x: np.ndarray, device: torch.device) -> torch.Tensor:
    """x on the device, without waiting for what the device does."""
    found = torch.from_numpy(x)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found


def dot_precision(x: torch.Tensor) -> str:
    """The `input_precision` of Triton's tl.dot of tensors like x."""
    return "tf32" if x.element_size() == 2 else "ieee"


def overlaps(x: torch.Tensor) -> bool:
    """Whether Triton's kernels of x may start before their predecessors have ended."""
    return x.is_cuda and device_caps(x.device).has_pdl and x.element_size() == 2
