"""Splits the world into replicas, and each replica into tensor and pipeline groups.

A replica is tp * pp consecutive ranks. Rank r has tensor index r % tp, so a tensor group's ranks are neighbours, which
mpirun places on one node. Pipeline stages are numbered by layers: the first has the embedding, the last has the head.
Rank 0 is in the *last* pipeline stage, so scheduling, sampling and text stay together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from .base import Alone, Comm, HostComm

BackendFactory = Callable[[Comm], Comm]


class GroupRank(NamedTuple):
    """A rank's place in a group: all that building a model asks of a communicator."""

    rank: int
    size: int


@dataclass(frozen=True)
class Mesh:
    world: HostComm  # its tensors are in CPU memory
    replica: int  # index of the replica that this rank belongs to
    tensor: Comm  # tensor-parallel group: the ranks that share this pipeline stage's layers
    pipe: Comm  # pipeline group: one rank of each pipeline stage, by its number. Activations go forward on it
    feedback: Comm  # the same ranks as pipe: sampled ids go back from the last pipeline stage to the first
    ep: int = 1  # neighbours of the tensor group that hold different experts; it divides its size
    # Further groups, by what they are for. A job makes each once, not with every model: nothing frees a communicator.
    groups: dict[str, HostComm] = field(default_factory=dict, repr=False, compare=False)

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

    @property
    def of_one_stage(self) -> Mesh:
        """The mesh of a model that is whole on this stage."""
        return replace(self, pipe=Alone(), feedback=Alone())

    @property
    def of_one_rank(self) -> Mesh:
        """The mesh of a model that each rank has all of."""
        return replace(self.of_one_stage, tensor=Alone(), ep=1)


def build(
    world: HostComm,
    tp: int,
    pp: int,
    backend_factory: BackendFactory = lambda group: group,
    tp_backend_factory: BackendFactory | None = None,
    ep: int = 1,
) -> Mesh:
    """Collective over world, whose size is a multiple of tp * pp; ep divides tp.

    backend_factory: makes the backend for a group's tensors from a host group; NcclComm on GPUs. tp_backend_factory:
    the same for the tensor group, where it differs.
    """
    replica, place = divmod(world.rank, tp * pp)
    stage = pp - 1 - place // tp
    index = place % tp
    tensor = world.split(replica * pp + stage, index)
    pipe, feedback = world.split(replica * tp + index, stage), world.split(replica * tp + index, stage)
    return Mesh(
        world,
        replica,
        (tp_backend_factory or backend_factory)(tensor),
        backend_factory(pipe),
        backend_factory(feedback),
        ep,
    )


def replica_ranks(size: int, replicas: int) -> list[range]:
    """The world's ranks of each replica."""
    each = size // replicas
    return [range(i * each, (i + 1) * each) for i in range(replicas)]


def control_groups(world: HostComm, replicas: int) -> dict[int, HostComm]:
    """The groups, by replica, of rank 0 and the replica's ranks, in the world's order.

    Rank 0 is in all of them, any other rank in its own replica's only. Each is made by its members alone: splitting the
    world for every replica would cost ranks times replicas. Collective over world.
    """
    members = [[*own] if 0 in own else [0, *own] for own in replica_ranks(world.size, replicas)]
    return {i: world.subgroup(ranks) for i, ranks in enumerate(members) if world.rank in ranks}
