"""Puts a model's experts into host memory: how many are resident, what is measured, and what the log says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from ....errors import MODEL, FatalError
from ....kernels import host_memory
from ....kernels.moe.host_experts import HostPairs, Stack
from ....kernels.moe.moe import Biases, Held
from .fused import FusedExperts
from .host import AUTO, Counters, HostExperts, Shared
from .host_buffers import SharedBuffers, Streamer
from .residents import Costs

CHOSEN = 8  # experts of a token that is timed
MANY = 64  # tokens of an expert that is timed
ROUNDS = 3


class ExpertRoom(NamedTuple):
    """What the user asks for."""

    offload: int = 0  # experts of a layer, on each rank, that are in host memory alone
    memory: int = 0  # bytes of the device for resident experts; 0: not said
    way: str = AUTO

    def __bool__(self) -> bool:
        return self.offload > 0 or self.memory > 0


ON_DEVICE = ExpertRoom()


class Offload:
    """Of one rank: made before the weights are loaded, and used when they are."""

    def __init__(self, layers: Iterable[FusedExperts], room: ExpertRoom, dtype: torch.dtype, device: torch.device):
        """layers: of this stage, which all have equally many experts. Raises FatalError where their format cannot be
        in host memory yet."""
        self.layers, self.device, self.way = list(layers), device, room.way
        self.counters = Counters()
        self.slots, self.expert_bytes = 0, 0
        if not self.layers:
            return
        both = [one for layer in self.layers for one in (layer.gate_up_proj, layer.down_proj)]
        if any(one.stored is not None for one in both):
            raise FatalError(
                "--num-experts-offload-per-rank: experts that are quantised cannot be in host memory yet: use a "
                "checkpoint in 16 or 32 bits, or share them out (--tp, --ep)",
                MODEL,
            )
        experts = both[0].experts.width
        self.expert_bytes = sum(one.num_weights for one in both[:2]) // max(experts, 1) * dtype.itemsize
        if room.offload:
            self.slots = max(0, experts - room.offload)
        else:
            self.slots = min(experts, room.memory // max(1, len(self.layers) * self.expert_bytes))
        for one in both:
            one.in_host = True

    @property
    def host_bytes(self) -> int:
        return sum(layer.down_proj.experts.width for layer in self.layers) * self.expert_bytes

    @property
    def resident_bytes(self) -> int:
        return len(self.layers) * self.slots * self.expert_bytes

    def attach(self) -> str:
        """Once the weights are loaded: pin them, fill the resident sets and measure. What the log should say."""
        if not self.layers:
            return ""
        cuda = self.device.type == "cuda"
        stacks = [self._stack(layer) for layer in self.layers]
        streamer = Streamer(stacks[0], self.device)
        costs = measure(stacks[0], self.layers[0], streamer)
        shared = Shared(self.way, costs, self.counters, SharedBuffers() if cuda else None, streamer)
        for layer, stack in zip(self.layers, stacks, strict=True):
            experts = layer.down_proj.experts
            held = Held(experts.start, experts.width, experts.size)
            slots = Stack(*(one.new_empty((self.slots, *one.shape[1:]), device=self.device) for one in stack))
            added = (layer.gate_up_proj.added_bias, layer.down_proj.added_bias)
            biases = Biases(*(None if bias is None else bias.data.to(self.device) for bias in added))
            layer.host = HostExperts(stack, biases, layer.activation, held, slots, shared)
        return (
            f"experts: {len(stacks[0].w13)} a layer in host memory, {self.host_bytes / 1e9:.2f} GB a rank; "
            f"{self.slots} of them resident, {self.resident_bytes / 1e9:.2f} GB; the CPU reads "
            f"{1e-9 / costs.read:.1f} GB/s and computes {2e-9 / costs.compute:.0f} GFLOP/s, copies run at "
            f"{1e-9 / costs.copy:.1f} GB/s"
        )

    def _stack(self, layer: FusedExperts) -> Stack:
        both = []
        for one in (layer.gate_up_proj, layer.down_proj):
            weight = one.weight.data
            if self.device.type == "cuda" and not weight.is_pinned():  # made anew in `finish`
                pinned = host_memory.zeros((*weight.shape,), weight.dtype, pin=True)
                weight = pinned.copy_(weight)
                one.weight = nn.Parameter(weight, requires_grad=False)
            both.append(weight)
        return Stack(*both)


def measure(stack: Stack, layer: FusedExperts, streamer: Streamer) -> Costs:
    """Seconds on this rank, while the others measure as well: so what they share is shared."""
    experts = len(stack.w13)
    size = stack.w13[0].numel() + stack.w2[0].numel()
    itemsize = stack.w13.element_size()
    few = min(CHOSEN, experts)
    read = _shortest(lambda i: _compute(stack, layer, (np.arange(few) + i * few) % experts, 1)) / few
    many = _shortest(lambda i: _compute(stack, layer, np.array([i % experts]), MANY))
    one = min(streamer.experts, experts)

    def copy(i: int) -> None:
        for _ in streamer.copies(stack, (np.arange(one) + i * one) % experts):
            pass
        if stack.w13.is_pinned():
            torch.cuda.synchronize()

    copied = _shortest(copy) / one
    return Costs(read / (size * itemsize), many / (MANY * size), copied / (size * itemsize))


def _compute(stack: Stack, layer: FusedExperts, experts: np.ndarray, tokens: int) -> None:
    x = torch.ones(tokens, stack.w2.shape[1], dtype=stack.w13.dtype)
    ids = torch.from_numpy(np.tile(experts.astype(np.int32), (tokens, 1)))
    pairs = HostPairs(x, ids, torch.ones(ids.shape), layer.activation)
    at = np.full(len(stack.w13), -1)
    at[experts] = experts
    pairs.add(stack, at, ids.numel())
    pairs.sum()


def _shortest(function: Callable[[int], None]) -> float:
    """Seconds of the shortest call after the first. function gets its number, so that it finds other weights each time,
    which are not in the cache yet."""
    times = []
    for i in range(ROUNDS + 1):
        started = time.perf_counter()
        function(i)
        times.append(time.perf_counter() - started)
    return min(times[1:])
