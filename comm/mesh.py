"""Tensor and pipeline groups out of one world.

Rank r has tensor index r % tp, so that a tensor group's ranks are neighbours, which mpirun places on one node. Stages
are numbered by layers: the first stage holds the embedding, the last stage the head, and the *last* stage is the one
with rank 0, so that scheduling, sampling and text stay together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .base import Comm, HostComm


@dataclass(frozen=True)
class Mesh:
    world: HostComm  # its tensors are in CPU memory
    tensor: Comm  # the ranks that share this stage's layers
    pipe: Comm  # one rank of each stage, the same tensor index; its rank is the stage. Activations go forward on it
    feedback: Comm  # the same ranks as pipe: sampled ids go back from the last stage to the first

    @property
    def stage(self) -> int:
        return self.pipe.rank

    @property
    def stages(self) -> int:
        return self.pipe.size

    @property
    def first(self) -> bool:
        return self.pipe.rank == 0

    @property
    def last(self) -> bool:
        return self.pipe.rank == self.pipe.size - 1


def degrees(size: int, tp: int, pp: int) -> tuple[int, int]:
    """The tensor and pipeline degree for `size` ranks; 0 means not given. Raises ValueError in words for the user."""
    if tp and pp and tp * pp != size:
        raise ValueError(f"--tp {tp} times --pp {pp} is {tp * pp}, but there are {size} ranks")
    if tp:
        if size % tp:
            raise ValueError(f"--tp {tp} does not divide the {size} ranks")
        return tp, size // tp
    pp = pp or 1
    if size % pp:
        raise ValueError(f"--pp {pp} does not divide the {size} ranks")
    return size // pp, pp


def build(world: HostComm, tp: int, pp: int, carry: Callable[[Comm], Comm] = lambda group: group) -> Mesh:
    """Collective over world; tp * pp is the world's size.

    carry: what carries a group's tensors, made from the group of the world's kind; NcclComm on GPUs.
    """
    stage = pp - 1 - world.rank // tp
    index = world.rank % tp
    tensor, pipe, feedback = world.split(stage, index), world.split(index, stage), world.split(index, stage)
    return Mesh(world, carry(tensor), carry(pipe), carry(feedback))
