"""Memory that loading takes of the device and of the host, and errors where it is too much."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...comm.base import HostComm
from ...comm.mesh import Mesh
from ...errors import MEMORY, FatalError, lacks_memory
from .base import Model
from .experts.fused import FusedExperts
from .experts.node_copy import sharers
from .experts.offload import Offload, OffloadOptions
from .layer_offload import LayerOffload, left_of_host
from .layers.embedding import VocabParallelEmbedding
from .weights.dummy import Dummy
from .weights.safetensors import Checkpoint
from .weights.slicing import ShardedModule
from .weights.striped import Striped


def place(
    model: Model,
    layers: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    device: torch.device,
    host_room: int | None,
    sharers: int = 1,
) -> tuple[int, int | None]:
    """Choose which of the stage's tables and layers are in host memory, in addition to the experts of `model.offload`.
    Returns the bytes that they take of the device's memory, less those of `weight_memory` that they do not, and what
    they leave of the host's. Raises FatalError where they do not fit there.

    dtypes: the model's and the checkpoint's. sharers: ranks of this node whose experts are the same memory.
    """
    need, (dtype, stored), offload = 0, dtypes, model.offload
    if offload is not None:
        _check_fixed(offload, host_room)
        host = offload.host_bytes // sharers
        need = offload.resident_bytes + (0 if device.type == "cuda" else host)
        there, here = (_read(model, stored, packed_there) for packed_there in (True, False))
        # Slots get memory when nothing is read any more, except what permanently resident experts take.
        need -= min(there, offload.resident_bytes - offload.fixed * offload.slot_bytes)
        host_room = left_of_host(host + here + offload.split_bytes, "experts", device, host_room)
    if layers:
        whole = {int(index): layer for index, layer in model.model.layers.items()}
        tables = [one for one in model.modules() if isinstance(one, VocabParallelEmbedding)]
        parked = model.layer_offload = LayerOffload(whole, tables, layers, dtype, device)
        need += parked.slot_bytes - (parked.host_bytes if device.type == "cuda" else 0)
        host_room = left_of_host(parked.host_bytes + parked.table_bytes, "layers and tables", device, host_room)
    return need, host_room


def fix(offload: Offload, read: int, room: int | None, group: HostComm | None) -> None:
    """Choose how many experts of each layer are on the device alone, as the host has no room for them.

    read: bytes that loading takes of the host in addition. room: that are free there; None: unlimited. group: ranks of
    this node whose experts are the same memory; collective over it.
    """
    count = offload.fewest_fixed(room, read, 1 if group is None else group.size)
    if group is not None:  # all free memory is not seen at the same time
        count = int(group.all_gather(torch.tensor([count], dtype=torch.int64)).max())
    offload.fix(count)


def _check_fixed(offload: Offload, room: int | None) -> None:
    """Raise FatalError where the host and the slots on the device together cannot hold the experts."""
    if offload.fixed and offload.fixed > min(offload.slots, offload.experts - 1):
        raise FatalError(
            f"this rank's experts take {offload.all_bytes / 1e9:.2f} GB of the host's memory, but "
            f"{(room or 0) / 1e9:.2f} GB are free for it, and {offload.resident_bytes / 1e9:.2f} GB of its GPU's are "
            f"for experts, {offload.slots} of each layer's {offload.experts}, where {offload.fixed} are to be: use "
            "more ranks (--tp, --ep, --pp) or a node with more memory, or leave more experts on the GPUs "
            "(--num-experts-offload-per-rank, --expert-memory); `phalanx fit` shows what fits",
            MEMORY,
        )


def _read(model: Model, stored: torch.dtype, packed_there: bool) -> int:
    """The most bytes that are read but not yet encoded of a module in host memory, on the device or on the host."""
    some = (one for one in model.sharded_modules() if one.in_host and one.packed_there == packed_there)
    return max((one.plain_bytes(stored) for one in some), default=0)


def place_together(
    model: Model,
    mesh: Mesh,
    in_host: tuple[OffloadOptions, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    device: torch.device,
    rooms: tuple[int | None, int | None],
    source: Dummy | Checkpoint | Striped,
) -> int:
    """`place` on all ranks, or on none. The bytes that loading takes of this rank's device. Collective over the world.

    in_host: experts, and bytes of tables and layers. rooms: free bytes of the device and of a GPU's host; None:
    unlimited.
    """
    experts, layers = in_host
    room, host_room = rooms
    if experts:
        fused = [one for one in model.modules() if isinstance(one, FusedExperts)]
        model.offload = Offload(fused, experts, dtypes[0], device)
    others = sum(one.kept_bytes(dtypes[0], device) for one in model.sharded_modules() if not one.in_host)

    def planned(group: HostComm | None) -> int:
        """group: as `fix` has it."""
        if model.offload is not None:
            left_for_experts = None if host_room is None else host_room - min(layers, others)
            fix(model.offload, _read(model, dtypes[1], packed_there=False), left_for_experts, group)
        several = 1 if group is None else group.size

        def work() -> int:
            need, left = place(model, layers, dtypes, device, host_room, several)
            need += weight_memory(model.sharded_modules(), source, *dtypes, device)
            check(need, room, source, left, device)
            return need

        return together(mesh.world, work)

    group = sharers(mesh) if experts else None
    need = planned(group)
    if model.offload is None:  # on all ranks
        return need
    refused = group is not None and not model.offload.share(group)
    if int(mesh.world.all_reduce(torch.tensor([int(refused)]))):
        # Each has its own then: more of them are fixed, or all of it may be too much.
        need = planned(None if refused else group)
    return need


class OthersRefuse(FatalError):
    """Another rank cannot go on, and logs the reason."""


def together(world: HostComm, work: Callable[[], int]) -> int:
    """Returns the result of `work`. Where it raises FatalError or lacks memory on one rank, others raise OthersRefuse,
    as what comes next may be collective. Collective over world."""
    made: int = 0
    stop: Exception | None = None
    try:
        made = work()
    except Exception as error:
        if not (isinstance(error, FatalError) or lacks_memory(error)):
            raise
        stop = error
    refused = int(world.all_reduce(torch.tensor([int(stop is not None)])))
    if stop is not None:
        raise stop
    if refused:
        raise OthersRefuse("another rank cannot load its part of the model", MEMORY)
    return made


def weight_memory(
    modules: list[ShardedModule],
    source: Dummy | Checkpoint | Striped,
    dtype: torch.dtype,
    stored: torch.dtype,
    device: torch.device,
) -> int:
    """Bytes that loading takes of the device at most: all weights as they are kept, and what is read but not yet
    encoded."""

    def plain_bytes(module: ShardedModule) -> int:
        here = module.in_host and not module.packed_there and device.type == "cuda"
        return 0 if here else module.plain_bytes(stored)

    kept = sum(module.kept_bytes(dtype, device) for module in modules if not module.shared and not module.in_host)
    if isinstance(source, Striped):
        return kept + source.peak(plain_bytes)
    return kept + max(map(plain_bytes, modules), default=0)


def too_large(need: int, text: str) -> FatalError:
    return FatalError(
        f"this rank's weights take {need / 1e9:.2f} GB, but {text}: use more ranks (--tp, --pp), a narrower "
        "--dtype or --isq; `phalanx fit` shows what fits",
        MEMORY,
    )


def check(
    need: int, room: int | None, source: Dummy | Checkpoint | Striped, host_room: int | None, device: torch.device
) -> None:
    """Raise FatalError where the weights do not fit, or what brings them: without that the kernel would kill the rank
    while it loads. room, host_room: free bytes of the device and of a GPU's host; None: unlimited."""
    if room is not None and need > room:
        where = "on its GPU" if device.type == "cuda" else "for it"
        raise too_large(need, f"{where} {room / 1e9:.2f} GB are free")
    left = room - need if device.type != "cuda" and room is not None else host_room
    if isinstance(source, Striped) and left is not None and source.buffers > left:
        raise FatalError(
            f"striped loading takes {source.buffers / 1e6:.1f} MB of the host's memory on this rank while it reads, "
            f"but {left / 1e6:.1f} MB are free beside the weights: choose --load direct, or more memory for the job",
            MEMORY,
        )
