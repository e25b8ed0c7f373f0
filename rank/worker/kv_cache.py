"""Sizes and allocates the KV cache."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from ... import errors, linux_calls
from ...comm.base import Comm
from ...comm.broadcast import gather_bytes
from .. import cache_groups
from ..cache_groups import Groups
from ..model.cache_spec import Caches, CacheSpec, PagedKV, block_bytes

PROC, SYS = Path("/proc"), Path("/sys")
MIB = 1 << 20
# The cache's default share of the free memory. On CPUs other processes need memory too. On GPUs free means after
# loading and the largest step; the rest is for CUDA graphs, libraries' workspaces and fragmentation. A Mac's GPU has
# the host's memory, and steps take theirs of it, too.
FRACTION = {"cpu": 0.4, "cuda": 0.95, "mps": 0.6}

# State snapshots for each sequence that may run at once: where its conversation goes on, and one that others share.
SNAPSHOTS = 2
SNAPSHOT_SHARE = 0.25  # of the memory that states leave, at most; the rest is for blocks


def free_memory(device: torch.device, ranks_here: int) -> int:
    """Bytes that one rank may still allocate: on its GPU, or as its share of this host's (or container's) memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = min(linux_calls.host_memory()[1], *_cgroup_rooms(PROC / "self/cgroup", SYS / "fs/cgroup"))
    if device.type == "mps":
        free = min(free, _metal_room())
    return max(0, free) // ranks_here


def _metal_room() -> int:
    """Bytes that a Mac's GPU may still have of the host's memory."""
    return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()


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
    """The bytes of `memory` left for blocks. states: bytes of what layers keep of `rows` sequences as a whole.

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


class Layout(NamedTuple):
    """How this stage's layers share the pool's blocks (rank/cache_groups.py)."""

    groups: Groups  # the same on all stages
    layer_groups: list[int]  # the number of each local layer's group
    block_bytes: int  # of a block of the pool


class _StageLayers(NamedTuple):
    """The layers of a pipeline stage."""

    stage: int
    alike: bool  # all keep as much of a token
    windows: dict[int, int]  # how many have each window
    chunks: list[int]  # of these windows


def layout(
    specs: Sequence[CacheSpec], world: Comm, stage: int, block_size: int, dtype: torch.dtype, longest: int,
    max_tables: int,
) -> Layout:  # fmt: skip
    """Collective over the world. specs: of this rank's layers, those of a pipeline stage. longest: tokens of a
    sequence. max_tables: block tables of a row, at most.

    Layers with windows of their own are groups where all layers of a stage keep as much of a token. Elsewhere all are
    one group, which frees nothing unless all layers have the same window.
    """
    paged = [spec for spec in specs if spec.block(block_size, dtype)]
    windows = Counter(cache_groups.effective_window(spec.window, longest) for spec in paged)
    alike = len({spec.block(block_size, dtype) for spec in paged}) < 2
    chunks = sorted({spec.window for spec in paged if isinstance(spec, PagedKV) and spec.chunked})
    gathered = gather_bytes(world, msgspec.json.encode(_StageLayers(stage, alike, windows, chunks)))
    stages = {one.stage: one for one in (msgspec.json.decode(data, type=_StageLayers) for data in gathered)}
    groups = cache_groups.choose_groups([one.windows for one in stages.values()], block_size)
    chunked = {window for one in stages.values() for window in one.chunks}
    groups = tuple(group._replace(chunked=group.window in chunked) for group in groups)
    if len(groups) > 1 and (len(groups) > max_tables or not all(one.alike for one in stages.values())):
        groups = cache_groups.ONE_GROUP
    whole = sum(block_bytes(spec, block_size, dtype) for spec in specs)
    if len(groups) == 1:
        return Layout(groups, [0] * len(specs), whole)
    numbers = {group.window: number for number, group in enumerate(groups)}
    layers = [numbers[cache_groups.effective_window(spec.window, longest)] for spec in specs]
    each = block_bytes(paged[0], block_size, dtype) if paged else 0
    return Layout(groups, layers, each * cache_groups.lanes(groups, windows))


def fit_length(
    blocks: int, block_size: int, max_model_len: int, chosen: bool, groups: Groups = cache_groups.ONE_GROUP,
    step: int = 1,
) -> int:  # fmt: skip
    """The longest sequence that may be served: it must fit in the pool alone, or admission could wait for ever.

    step: tokens that a step may compute of it. Raises FatalError where the user chose a length that does not fit, or
    where there is no block at all.
    """
    room = cache_groups.longest(groups, block_size, blocks, step)
    if room >= max_model_len:
        return max_model_len
    if chosen or not room:
        raise errors.FatalError(
            f"the KV cache holds {room} tokens, --max-model-len asks for {max_model_len}: raise --mem or "
            "--kv-fraction, lower --max-model-len, or use more ranks",
            errors.MEMORY,
        )
    return room


def allocate_pool(
    specs: Sequence[CacheSpec], how: Layout, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device,
    rows: int = 0, query_len: int = 1,
) -> tuple[Caches, list[Tensor]]:  # fmt: skip
    """Each layer's tensors as `allocate` makes them, and those of the pool, [blocks, ...] each, which host blocks copy.

    With several groups the pool is one tensor of lanes for each tensor of a layer. A group's n-th layer has as many
    lanes side by side as a block has entries, where layers of other groups have theirs, too. Entry i of block b is at
    i * blocks + b.
    """
    if len(how.groups) == 1:
        caches = allocate(specs, blocks, block_size, dtype, device, rows, query_len)
        pairs = zip(specs, caches, strict=True)
        return caches, [x for spec, layer in pairs for _, x in zip(spec.block(block_size, dtype), layer, strict=False)]
    shapes = next((found for spec in specs if (found := spec.block(block_size, dtype))), ())
    lanes = how.block_bytes // sum(one.nbytes for one in shapes) if shapes else 0
    pool = [_tensor((lanes * blocks, *one.shape), one.dtype, device) for one in shapes]
    before = [0] * len(how.groups)  # layers of each group
    caches = []
    for spec, number in zip(specs, how.layer_groups, strict=True):
        own = _rows(spec, rows, device, query_len)
        if not spec.block(block_size, dtype):
            caches.append(own)
            continue
        size = how.groups[number].entries * blocks
        start = before[number] * size
        before[number] += 1
        caches.append((*(x[start : start + size] for x in pool), *own))
    return caches, [lane for x in pool for lane in x.view(lanes, blocks, *x.shape[1:])]


def allocate(
    specs: Sequence[CacheSpec], blocks: int, block_size: int, dtype: torch.dtype, device: torch.device, rows: int = 0,
    query_len: int = 1,
) -> Caches:  # fmt: skip
    """Each layer's tensors, zeroed, in its spec's order: [blocks, *shape of a block], then [rows, *shape of a row].
    dtype: as of CacheSpec.block. query_len: as of CacheSpec.row."""
    return [_make(spec, blocks, rows, block_size, dtype, device, query_len) for spec in specs]


def allocate_shared(
    specs: Sequence[CacheSpec], blocks: int, block_size: int, dtype: torch.dtype, device: torch.device, rows: int = 0,
    query_len: int = 1,
) -> Caches:  # fmt: skip
    """Allocates like `allocate`, but layers of one shape share their tensors: for steps whose results are unused."""
    kinds = [(spec.block(block_size, dtype), spec.row()) for spec in specs]
    of_kind = dict(zip(kinds, specs, strict=True))
    made = {kind: _make(spec, blocks, rows, block_size, dtype, device, query_len) for kind, spec in of_kind.items()}
    return [made[kind] for kind in kinds]


def _make(
    spec: CacheSpec, blocks: int, rows: int, block_size: int, dtype: torch.dtype, device: torch.device,
    query_len: int = 1,
) -> tuple[Tensor, ...]:  # fmt: skip
    paged = (_tensor((blocks, *one.shape), one.dtype, device) for one in spec.block(block_size, dtype))
    return *paged, *_rows(spec, rows, device, query_len)


def _rows(spec: CacheSpec, rows: int, device: torch.device, query_len: int = 1) -> tuple[Tensor, ...]:
    return tuple(_tensor((rows, *one.shape), one.dtype, device) for one in spec.row(query_len))


def _tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    make = _untouched if device.type == "cpu" else torch.zeros
    return make(shape, dtype=dtype, device=device)


def _untouched(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros whose pages take memory only when they are first written, as numpy leaves the zeroing to the kernel.

    torch.zeros would write gigabytes at once that most jobs never use.
    """
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
