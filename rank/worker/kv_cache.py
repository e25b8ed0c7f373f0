"""Sizes and allocates the KV cache."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import Tensor

from ... import errors
from ...comm.base import Comm
from ..model.cache_spec import Caches, CacheSpec

PROC, SYS = Path("/proc"), Path("/sys")
MIB = 1 << 20
# The cache's default share of the free memory. On CPUs other processes need memory too. On GPUs free means after
# loading and the largest step; the rest is for CUDA graphs, libraries' workspaces and fragmentation.
FRACTION = {"cpu": 0.4, "cuda": 0.95}

# State snapshots for each sequence that may run at once: where its conversation goes on, and one that others share.
SNAPSHOTS = 2
SNAPSHOT_SHARE = 0.25  # of the memory that states leave, at most; the rest is for blocks


def free_memory(device: torch.device, ranks_here: int) -> int:
    """Bytes that one rank may still allocate: on its GPU, or as its share of this host's (or container's) memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = min(psutil.virtual_memory().available, *_cgroup_rooms(PROC / "self/cgroup", SYS / "fs/cgroup"))
    return max(0, free) // ranks_here


def _cgroup_rooms(own: Path, mount: Path) -> list[int]:
    """Bytes left in this process's memory cgroup and in each above it, where Slurm and containers limit jobs.

    Reads both versions: v2's line is `0::/path`, v1's `N:...,memory,...:/path` under mount/memory. Page cache that can
    be dropped counts as free.
    """
    rooms = [1 << 62]
    for line in own.read_text().splitlines() if own.exists() else []:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, limit, usage, cache = mount, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit, usage = mount / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        place = root / path.lstrip("/")
        while place.is_relative_to(root):
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                droppable = next(int(n) for k, n in map(str.split, (place / "memory.stat").open()) if k == cache)
                rooms.append(int((place / limit).read_text()) - int((place / usage).read_text()) + droppable)
            place = place.parent
    return rooms


def num_blocks(world: Comm, block_bytes: int, wanted: int, memory: int) -> int:
    """Blocks that every rank can hold: as many as fit in the smallest `memory` of all ranks, at most `wanted`."""
    mine = min(wanted, memory // block_bytes) if block_bytes else wanted  # a stage may have states alone
    return int(world.all_gather(torch.tensor([mine])).min())


def less_states(memory: int, states: int, rows: int) -> int:
    """What is left of `memory` for blocks. states: bytes of what layers keep of `rows` sequences as a whole.

    Raises FatalError where these do not fit.
    """
    if states and states >= memory:
        raise errors.FatalError(
            f"the recurrent states of {rows} sequences take {states / MIB:.0f} MiB a rank, of {memory / MIB:.0f} MiB "
            "for caches: lower --max-num-seqs, raise --mem or --kv-fraction, or use more ranks",
            errors.MEMORY,
        )
    return memory - states


def num_snapshots(world: Comm, state_bytes: int, memory: int, longest: int, rows: int) -> int:
    """State snapshots that every rank can hold (rank/scheduler/snapshots.py); 0 where no rank has states.

    They get a part of `memory`, of which the blocks of one sequence, of `longest` bytes, are not taken: SNAPSHOTS for
    each of `rows` sequences at most. state_bytes: what this rank keeps of a sequence.
    """
    mine = SNAPSHOTS * rows
    if state_bytes:
        mine = max(0, min(mine, int(memory * SNAPSHOT_SHARE) // state_bytes, (memory - longest) // state_bytes))
    all_ranks = world.all_gather(torch.tensor([mine, bool(state_bytes)])).view(-1, 2)
    return int(all_ranks[:, 0].min()) * bool(all_ranks[:, 1].any())


def check_host(memory: int, free: int) -> None:
    """Raise FatalError where a rank is to take more of the host's memory than it may: the kernel would kill it."""
    if memory > free:
        raise errors.FatalError(
            f"--kvcache-mem-cpu asks for {memory / MIB:.0f} MB of each rank, but {free / MIB:.0f} are free on this "
            "host for one: ask for less",
            errors.MEMORY,
        )


def fit_length(blocks: int, block_size: int, max_model_len: int, chosen: bool) -> int:
    """The longest sequence that may be served: it must fit in the pool alone, or admission could wait for ever.

    Raises FatalError where the user chose a length that does not fit, or where there is no block at all.
    """
    room = blocks * block_size
    if room >= max_model_len:
        return max_model_len
    if chosen or not blocks:
        raise errors.FatalError(
            f"the KV cache holds {room} tokens, --max-model-len asks for {max_model_len}: raise --mem or "
            "--kv-fraction, lower --max-model-len, or use more ranks",
            errors.MEMORY,
        )
    return room


def allocate(
    specs: Sequence[CacheSpec], blocks: int, block_size: int, dtype: torch.dtype, device: torch.device, rows: int = 0
) -> Caches:
    """Each layer's tensors, zeroed, in its spec's order: [blocks, *shape of a block], then [rows, *shape of a row].
    dtype: as of CacheSpec.block."""
    return [_make(spec, blocks, rows, block_size, dtype, device) for spec in specs]


def allocate_shared(
    specs: Sequence[CacheSpec], blocks: int, block_size: int, dtype: torch.dtype, device: torch.device, rows: int = 0
) -> Caches:
    """As `allocate`, but layers of one shape share their tensors: for steps whose results nobody reads."""
    kinds = [(spec.block(block_size, dtype), spec.row()) for spec in specs]
    of_kind = dict(zip(kinds, specs, strict=True))
    made = {kind: _make(spec, blocks, rows, block_size, dtype, device) for kind, spec in of_kind.items()}
    return [made[kind] for kind in kinds]


def _make(
    spec: CacheSpec, blocks: int, rows: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    make = _untouched if device.type == "cpu" else torch.zeros
    shapes = [((blocks, *one.shape), one.dtype) for one in spec.block(block_size, dtype)]
    shapes += [((rows, *one.shape), one.dtype) for one in spec.row()]
    return tuple(make(shape, dtype=kind, device=device) for shape, kind in shapes)


def _untouched(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros whose pages take memory only when they are first written, as numpy leaves the zeroing to the kernel.

    torch.zeros would write gigabytes at once that most jobs never use.
    """
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
