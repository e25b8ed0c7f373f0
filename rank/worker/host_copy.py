"""The weights of a model that sleeps, in host memory: their device memory is given back, and taken again.

Tensors keep their storages, which lose their memory and get some again at another address, so that all views of them
stay what they were. Whatever holds addresses (CUDA graphs) has to be made again.
"""

from __future__ import annotations

import functools
import gc
import types
from typing import Any

import torch
from torch import Tensor

from ... import comm
from ...kernels import host_memory

# Objects whose referents are no part of a model: the program. Collectives and their buffers are none, either.
_PROGRAM = (type, types.ModuleType, types.CodeType, types.FrameType)
_COLLECTIVES = comm.__name__ + "."


def storages(root: Any, device: torch.device) -> list[torch.UntypedStorage]:
    """The memory on this device of all tensors that are reached from an object, each once, but what others lent."""
    found: dict[int, torch.UntypedStorage] = {}
    seen: set[int] = set()
    left = [root]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, _PROGRAM) or type(one).__module__.startswith(_COLLECTIVES):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            if one.device.type == device.type:
                storage = one.untyped_storage()
                if storage.nbytes() and storage.resizable():
                    found.setdefault(storage.data_ptr(), storage)
        elif isinstance(one, types.FunctionType):  # not its module's names
            left += [one.__closure__, one.__defaults__]
        elif isinstance(one, functools.partial):
            left += [one.func, one.args, one.keywords]
        else:
            left += gc.get_referents(one)
    return list(found.values())


class HostCopy:
    """A copy of storages; pinned where they are a GPU's and the driver allows it. Raises HostMemoryError."""

    def __init__(self, storages: list[torch.UntypedStorage]):
        self._storages = storages
        self._copies = [_copy(storage) for storage in storages]

    def give_device_memory(self) -> None:
        """Give the storages' memory back to the device's allocator."""
        for storage in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Take memory again, and have in it what was there. A copy is given back as soon as it is not needed."""
        while self._storages:
            storage, copy = self._storages[-1], self._copies[-1]
            storage.resize_(copy.nbytes)
            _bytes(storage).copy_(copy)
            del self._storages[-1], self._copies[-1]


def _copy(storage: torch.UntypedStorage) -> Tensor:
    return host_memory.zeros((storage.nbytes(),), torch.uint8, pin=storage.device.type == "cuda").copy_(_bytes(storage))


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """A storage as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
