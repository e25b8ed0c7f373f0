"""Experts in host memory that several ranks of a node hold alike, as the replicas of a data-parallel job do: once.

The ranks map the same memory, which has no name: the kernel frees it when the last of them ends, however that happens.
Each stack of experts has a place of its own there, so ranks may load them in any order. A rank makes a stack as ever,
copies its part of the experts there, and uses all of them there once every rank has done so. So a node of several NUMA
nodes has the pages on those of all these ranks, and no rank ever has more than one stack of its own.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ....comm.base import HostComm
from ....comm.hosts import name_hosts
from ....comm.mesh import Mesh
from ....comm.shm import share
from ....kernels import host_memory
from ....kernels.quantized import gpu_layout

PAGE = 4096
SPARE = 1 << 20  # bytes that a stack may take beyond twice the estimate; pages that nobody writes take no memory


def sharers(mesh: Mesh) -> HostComm | None:
    """The ranks of this node that hold the same part of the model. None where each has another. Collective over the
    mesh's world."""
    of_replica = mesh.tensor.size * mesh.pipe.size
    if mesh.world.size == of_replica:
        return None
    group = mesh.groups.get("sharers")
    if group is None:  # on all ranks
        hosts = name_hosts(mesh.world)
        color = hosts.index(hosts[mesh.world.rank]) * of_replica + mesh.world.rank % of_replica
        group = mesh.groups["sharers"] = mesh.world.split(color, mesh.world.rank)
    return group if group.size > 1 else None


class NodeCopy:
    """The shared copy of the ranks of one group."""

    def __init__(self, stacks: Sequence[Any], sizes: Sequence[int], group: HostComm):
        """stacks: of experts, the same on all ranks. sizes: bytes of each, about. Where `memory` is None then, ranks
        cannot map each other's, and this is of no use. Collective over the group."""
        rooms = [-(-(2 * size + SPARE) // PAGE) * PAGE for size in sizes]
        begins = np.cumsum([PAGE, *rooms]).tolist()
        self._rooms = dict(zip(map(id, stacks), zip(begins, rooms, strict=False), strict=True))
        self.group = group
        self.memory: mmap.mmap | None = share(group, begins[-1], True)
        self._areas: list[np.ndarray] = []

    def place(self, key: Any, stack: Any) -> Any:
        """`stack` in the common memory, of which this rank fills its part. As it is where it does not fit there, as
        then on all ranks. key: one of `stacks`."""
        parts = gpu_layout.parts(stack)
        begin, room = self._rooms[id(key)]
        used = sum(host_memory.aligned(x.nbytes) for x in parts.tensors)
        if not used or used > room:
            return stack
        assert self.memory is not None
        area = np.frombuffer(self.memory, np.uint8, used, begin)
        self._areas.append(area)
        at, made = 0, []
        for x in parts.tensors:
            mine = torch.from_numpy(area[at : at + x.nbytes]).view(x.dtype).view(x.shape)
            first, last = (len(x) * (self.group.rank + more) // self.group.size for more in (0, 1))
            mine[first:last] = x[first:last]
            made.append(mine)
            at += host_memory.aligned(x.nbytes)
        return parts.of(made)

    def holds(self, x: torch.Tensor) -> bool:
        """Whether it lies in the common memory."""
        assert self.memory is not None
        whole = np.frombuffer(self.memory, np.uint8)
        return 0 <= x.data_ptr() - whole.ctypes.data < whole.nbytes

    def pin(self) -> None:
        """Once all ranks have filled their parts: else pages would come to be on the node of the rank that pins."""
        for area in self._areas:
            host_memory.pin_memory(area)
        self._areas.clear()
