"""Puts a model's experts into host memory: how many are resident, what is measured, and the line of the log."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ....comm.base import HostComm
from ....errors import USAGE, FatalError
from ....kernels import host_memory
from ....kernels.cpp import ops
from ....kernels.moe.host_choice import TIMED_ROWS, Costs
from ....kernels.moe.host_experts import Experts, HostRouted, multiplies
from ....kernels.moe.moe import UNBIASED, Biases, LocalExperts, Matrices, plain
from ....kernels.quantized import gpu_layout
from ..batch import Batch
from ..weights.slicing import ShardedModule
from .deferral import Deferral
from .fused import FusedExperts, StackedLinear
from .host import AUTO, HostExperts
from .host_buffers import KEPT, HostStack, HostWork
from .node_copy import NodeCopy
from .small_batch import Counters, Shared
from .streamer import BUFFER, BUFFERS, Streamer

CHOSEN = 8  # experts of a token that is timed
ROUNDS = 5
TOGETHER = 10e-3  # seconds for which copies run beside the CPU
AWAKE = 5e-3  # seconds that threads look for more before they sleep: the CPU may have no experts for tens of layers
SPARED = 0.15  # of a GPU's free memory that is left for the cache and steps, where experts overflow to the host
HOST_SPARED = 0.05  # of the host's that is left for all else, where it cannot hold all experts

log = logging.getLogger(__name__)


class OffloadOptions(NamedTuple):
    """The user's options."""

    offload: int = 0  # experts of a layer, on each rank, that are in host memory alone
    memory: int = 0  # bytes of the device for resident experts; 0: not said
    placement: str = AUTO
    defers: bool = False  # as deferral.py does

    def __bool__(self) -> bool:
        return self.offload > 0 or self.memory > 0


ON_DEVICE = OffloadOptions()


def overflowing(
    model: nn.Module, memory: Callable[[], int], room: int | None, dtype: torch.dtype, device: torch.device,
    world: HostComm,
) -> OffloadOptions:  # fmt: skip
    """This rank's experts that go to host memory, unless the user chose them: nothing where all ranks' weights
    fit, and never on CPUs.

    memory: bytes that loading all weights takes of this rank's device. room: that are free there; None: unlimited. All
    ranks have experts in host memory or none, as that changes how steps are cut. Collective over the world, on GPUs.
    """
    if device.type != "cuda" or room is None:
        return ON_DEVICE
    layers, need = [one for one in model.modules() if isinstance(one, FusedExperts)], memory()
    figures = world.all_gather(torch.tensor([need, room, len(layers)], dtype=torch.int64)).view(-1, 3).tolist()
    lacking = [(mine - free, rank) for rank, (mine, free, some) in enumerate(figures) if mine > free and some]
    if not lacking:
        return ON_DEVICE
    if world.rank == 0:
        rank = max(lacking)[1]
        log.info(
            "the weights do not fit on all GPUs (%.2f GB on rank %d's, where %.2f GB are free): what does not fit of "
            "the experts goes to host memory; --expert-memory says how much stays",
            figures[rank][0] / 1e9,
            rank,
            figures[rank][1] / 1e9,
        )
    moved = {one for layer in layers for one in (layer.gate_up_proj, layer.down_proj)}
    kept = [one for one in model.modules() if isinstance(one, ShardedModule) and not one.shared and one not in moved]
    others = sum(one.kept_bytes(dtype, device) for one in kept)
    return OffloadOptions(memory=max(1, int(room * (1 - SPARED)) - others - BUFFERS * BUFFER))


class Offload:
    """Expert offload of one rank: made before the weights are loaded, and used when they are."""

    def __init__(self, layers: Iterable[FusedExperts], room: OffloadOptions, dtype: torch.dtype, device: torch.device):
        """layers: of this stage, which all have equally many experts."""
        self.layers, self.device, self.room, self.dtype = list(layers), device, room, dtype
        self.counters = Counters()
        self.deferral: Deferral | None = None
        self._stacks: list[HostStack] = []
        self._node: NodeCopy | None = None
        self.sharers = 1  # ranks of the node whose experts are the same memory
        self.fixed = 0  # of each layer's experts, the first ones, which are on the device alone and never leave it
        self._fixed: dict[nn.Module, Matrices] = {}  # these, from `keep` to `attach`
        self.all_bytes, self.host_bytes = 0, 0  # of all experts as they lie in host memory, and of those that do
        self.split_bytes = 0  # that the host needs more while experts are loaded
        self.slots, self.slot_bytes = 0, 0  # slot_bytes: of one expert of each layer on the device
        if not self.layers:
            return
        if not ops.available():
            raise FatalError(
                "experts in host memory are computed by C++, and this machine has no compiler: install g++, or "
                "`pip install phalanx[cpu]`",
                USAGE,
            )
        if not all(layer.gated for layer in self.layers):
            raise FatalError(
                "experts without a gate, as this model has, cannot be in host memory: use more ranks, or --isq", USAGE
            )
        stacks = self._linears()
        sizes = [one.host_bytes(dtype, device) for one in stacks]
        self.all_bytes = self.host_bytes = sum(sizes)
        self._largest = max(sizes)
        self.slot_bytes = sum(one.slot_bytes(dtype, device) for one in stacks)
        self._count()
        for one in stacks:
            one.in_host = True
            one.packed_there = device.type == "cuda" and one.stored is not None and one.stored.packs_for_host

    def _linears(self) -> list[StackedLinear]:
        return [one for layer in self.layers for one in (layer.gate_up_proj, layer.down_proj)]

    @property
    def experts(self) -> int:
        """The number of a layer's experts on this rank."""
        return self.layers[0].down_proj.experts.width if self.layers else 0

    def fewest_fixed(self, room: int | None, read: int, sharers: int) -> int:
        """How many experts of each layer have to be fixed; all where even that is too few. room: bytes that are free
        for experts in the host's memory; None: unlimited. read: what loading takes there in addition. sharers: ranks of
        this node whose experts are the same memory."""
        if self.device.type != "cuda" or not self.layers or room is None or self.all_bytes // sharers + read <= room:
            return 0
        left = room * (1 - HOST_SPARED) - read - self._largest  # a stack is there twice while it is split
        fits = left * sharers // (self.all_bytes / self.experts)
        return self.experts - max(0, int(fits))

    def fix(self, count: int) -> None:
        """Before the weights are loaded: so many experts of each layer are fixed."""
        if count:
            self.fixed, self.split_bytes = count, self._largest
            for one in self._linears():
                one.fix(count, self.device)
            self.host_bytes = self.all_bytes * (self.experts - count) // self.experts

    def share(self, group: HostComm) -> bool:
        """Before the weights are loaded: these ranks of the node hold the same experts. Whether they can map each
        other's memory; else each has its own. Collective over the group."""
        stacks = self._linears()
        if stacks:
            sizes = [one.host_bytes(self.dtype, self.device) for one in stacks]
            hosted = [size * (self.experts - self.fixed) // self.experts for size in sizes]
            node = NodeCopy(stacks, hosted, group)
            if node.memory is None:
                return False
            self._node = node
        self.sharers = group.size
        return True

    def keep(self, module: ShardedModule) -> None:
        """Once a module is loaded."""
        if not (isinstance(module, StackedLinear) and module.in_host) or (self._node is None and not self.fixed):
            return
        if self.fixed and self.device.type == "cuda":
            torch.cuda.empty_cache()  # what packing took: else more and more of it would have tensors in it that stay
        hosted = self._form(module)
        if module.of_fixed is not None:
            self._fixed[module], module.of_fixed = module.of_fixed, None
            if self._node is None:
                return
        elif self.fixed:
            parts = gpu_layout.parts(hosted)
            self._fixed[module] = parts.of([x[: self.fixed].to(self.device, copy=True) for x in parts.tensors])
            hosted = parts.of([x[self.fixed :] for x in parts.tensors])
        placed = hosted if self._node is None else self._node.place(module, hosted)
        if placed is hosted and self.fixed and not module.fixed:  # a part of memory that is given back
            cuda, parts = self.device.type == "cuda", gpu_layout.parts(hosted)
            placed = parts.of([host_memory.pinned(x) if cuda else x.clone() for x in parts.tensors])
        module.hold(placed)

    def _count(self) -> None:
        if self.room.offload:
            self.slots = max(0, self.experts - self.room.offload)
        else:
            self.slots = min(self.experts, self.room.memory // max(1, self.slot_bytes))

    @property
    def resident_bytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.slot_bytes

    def pin(self) -> int:
        """Once all ranks have loaded their weights: pin them where there is a GPU. Their bytes."""
        if self._node is not None and self.device.type == "cuda":
            self._node.pin()
        self._stacks = [HostStack(self._stack(layer), self.device) for layer in self.layers]
        self.host_bytes = sum(x.nbytes for one in self._stacks for x in one.tensors)
        return self.host_bytes

    def attach(self) -> str:
        """After `pin`: fill the resident sets and measure, next to all other ranks. Returns a line for the log."""
        if not self.layers:
            return ""
        cuda, stacks = self.device.type == "cuda", self._stacks
        if cuda:
            torch.cuda.empty_cache()  # what loading took, before slots fill the device
        self.slot_bytes = sum(one.there.nbytes(1) for one in stacks)
        self._count()
        self.slots = max(self.slots, self.fixed)
        streamer = Streamer(stacks, self.device)
        if cuda:
            ops.stay_awake(AWAKE)
        costs: dict[Hashable, Costs] = {}
        for layer, stack in zip(self.layers, stacks, strict=True):
            costs[stack.form] = costs.get(stack.form) or measure(stack, layer.activation, streamer, self.dtype)
        shared = Shared(self.room.placement, self.counters, streamer)
        for layer, stack in zip(self.layers, stacks, strict=True):
            experts = layer.down_proj.experts
            held = LocalExperts(experts.start, experts.width, experts.size)
            slots = stack.there.empty(self.slots, self.device)
            added = (layer.gate_up_proj.added_bias, layer.down_proj.added_bias)
            biases = Biases(*(None if bias is None else bias.data.to(self.device) for bias in added))
            of = stack, biases, layer.activation, held, slots, costs[stack.form], shared
            both = [self._fixed.pop(one) for one in (layer.gate_up_proj, layer.down_proj) if self.fixed]
            layer.host = HostExperts(*of, HostStack(Experts(*both), self.device) if both else None)
        if self.room.defers:
            self.deferral = Deferral([layer.host for layer in self.layers if layer.host is not None])
        if cuda and self.fixed:
            torch.cuda.empty_cache()  # their memory before they had slots, in pieces
        return self._told(stacks[0], costs[stacks[0].form])

    def begin(self, batches: Sequence[Batch]) -> None:
        """A step begins."""
        if self.deferral is not None:
            self.deferral.begin(batches)

    def longest_step(self, tokens: int) -> float:
        """Seconds that this rank's experts take of a step of so many tokens, by what was measured."""
        return sum(one.host.seconds(tokens * one.top_k) for one in self.layers if one.host is not None)

    def _told(self, stack: HostStack, costs: Costs) -> str:
        size = sum(x[0].nbytes for x in stack.tensors)
        weights = sum(math.prod(one.shape[1:]) for one in stack.stack)
        fixed = f"{self.fixed} more fixed on the device alone, {self.fixed * self.slot_bytes / 1e9:.2f} GB; "
        fixed = fixed if self.fixed else ""
        shared = f" that {self.sharers} ranks of a node share" if self.sharers > 1 else " a rank"
        return (
            f"experts: {stack.stack.size} a layer in host memory, {self.host_bytes / 1e9:.2f} GB{shared}; "
            f"{self.slots - self.fixed} of them resident, {(self.slots - self.fixed) * self.slot_bytes / 1e9:.2f} GB; "
            f"{fixed}the CPU reads "
            f"{1e-9 * size / costs.cpu[0]:.1f} GB/s and computes {2e-9 * weights * TIMED_ROWS[-1] / costs.cpu[-1]:.0f} "
            f"GFLOP/s (an expert of {', '.join(map(str, TIMED_ROWS))} tokens: "
            f"{', '.join(f'{1e6 * one:.0f}' for one in costs.cpu)} us), copies "
            f"run at {1e-9 * size / costs.copy:.1f} GB/s; overlapped they take {costs.cpu_overlapped:.2f} and "
            f"{costs.copy_overlapped:.2f} times as long"
        )

    def _form(self, one: StackedLinear) -> Matrices:
        """The form in host memory: dequantised what the device has no form of, or C++ no operations for."""
        held = one.matrices
        known = (isinstance(held, Tensor) or multiplies(held)) and not one.becomes_plain(self.device)
        return held if known else plain(held, self.dtype)

    def _stays(self, x: Tensor) -> bool:
        """Whether it is pinned, or would be there twice if it was copied."""
        return x.is_pinned() or (self._node is not None and self._node.holds(x))

    def _stack(self, layer: FusedExperts) -> Experts:
        """Its weights, pinned where there is a GPU."""
        both = []
        for one in (layer.gate_up_proj, layer.down_proj):
            held = self._form(one)
            if self.device.type == "cuda":
                parts = gpu_layout.parts(held)
                held = parts.of([x if self._stays(x) else host_memory.pinned(x) for x in parts.tensors])
                one.hold(held)
            both.append(held)
        return Experts(*both)


def measure(stack: HostStack, act: str, streamer: Streamer, dtype: torch.dtype) -> Costs:
    """Seconds on this rank, while the others measure as well: so what they share is shared."""
    experts = stack.stack.size
    one = min(streamer.at_once(stack), experts)
    turns = itertools.count()  # each round reads other experts, which are not in the cache yet

    def copy() -> float:
        started, first = time.perf_counter(), next(turns) * one
        for _ in streamer.copies(stack, (np.arange(one) + first) % experts):
            pass
        if streamer.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - started) / one

    copied = _shortest(copy)
    turns = itertools.count()
    cpu = []
    for rows in TIMED_ROWS:
        if rows >= KEPT:
            _let_others_sleep()
        cpu.append(_shortest(_on_cpu(stack, act, dtype, rows, turns)))
    overlapped = (1.0, 1.0)
    if streamer.device.type == "cuda":
        _let_others_sleep()
        overlapped = _overlapped(stack, streamer, _on_cpu(stack, act, dtype, 1, turns), cpu[0], copied)
    return Costs(tuple(cpu), copied, *overlapped)


def _let_others_sleep() -> None:
    """Few rows and many are computed by different threads on the same cores, where both look for more for a while."""
    time.sleep(2 * AWAKE)


def _overlapped(
    stack: HostStack, streamer: Streamer, on_cpu: Callable[[], float], cpu: float, copied: float
) -> tuple[float, float]:
    """How many times as long as alone the CPU and copies take next to each other. on_cpu: returns seconds of an expert.

    Its first call is not counted, and no single one tells: threads that had to wake, or lost their core for once, took
    a hundred times as long at some starts.
    """
    on_cpu()
    experts, one = stack.stack.size, min(streamer.at_once(stack), stack.stack.size)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for turn in range(max(2, int(TOGETHER / (copied * one)))):
        for _ in streamer.copies(stack, (np.arange(one) + turn * one) % experts):
            pass
    last.record()
    times = [on_cpu()]
    while not last.query():
        times.append(on_cpu())
    last.synchronize()
    copies = first.elapsed_time(last) * 1e-3 / (one * (turn + 1))
    return max(1.0, statistics.median(times) / cpu), max(1.0, copies / copied)


def _on_cpu(stack: HostStack, act: str, dtype: torch.dtype, rows: int, turns: Iterator[int]) -> Callable[[], float]:
    """A function that computes some experts of so many rows each, as steps do, and returns the seconds of one."""
    experts = stack.stack.size
    few = min(CHOSEN, experts)
    x, out = torch.ones(rows, stack.stack.w2.shape[1], dtype=dtype), torch.empty(rows, stack.stack.w2.shape[1])
    ids, at = torch.zeros(rows, few, dtype=torch.int32), torch.full((experts,), -1)
    fresh = functools.partial(HostRouted, x, ids, torch.ones(ids.shape), act)
    work = HostWork()
    threads = max(1, ops.others()) if rows < KEPT else torch.get_num_threads()

    def run() -> float:
        chosen = (torch.arange(few) + next(turns) * few) % experts
        ids[:], at[:] = chosen.int(), -1
        at[chosen] = chosen
        started = time.perf_counter()
        work.of(stack, at, fresh, UNBIASED, out).run(threads)
        return (time.perf_counter() - started) / few

    return run


def _shortest(function: Callable[[], float]) -> float:
    """The shortest of the seconds that it returns, but for the first."""
    return min([function() for _ in range(ROUNDS + 1)][1:])
