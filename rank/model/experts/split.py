"""Experts that CPU and GPU compute together in steps of few tokens: the GPU reads its part where that lies.

Where the CPU serves all that is missing of a step (few_tokens.py), PCIe would idle. So the GPU has some of each
expert's intermediate units (kernels/moe/split_experts.py), which lie in host memory a second time, in the form of its
kernels. These read them from there, in a stream beside the step's, which has resident experts to compute meanwhile.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ....errors import HostMemoryError
from ....kernels import host_memory
from ....kernels.moe import host_exchange, split_experts
from ....kernels.moe.host_experts import Experts
from ....kernels.moe.moe import Biases, Held, Inputs, fused_experts
from ....kernels.quantized import gpu_form
from .host_buffers import HostStack, Layout

if TYPE_CHECKING:
    from .host import HostExperts

HOST_SHARE = 0.5  # of what is free of the host's memory beside what is asked for, at most: other processes need some
NO_SHARE = "the GPU computes no part of the experts that the CPU serves"


class GpuSum(NamedTuple):
    """The GPU's part of a layer's weighted sums, [T, H], which the other stream makes."""

    y: Tensor
    done: torch.cuda.Event
    read: tuple[Tensor, ...]  # memory of the step's stream, which nothing else may get before that is done

    def joined(self) -> Tensor:
        """For whom launches in the current stream from now on."""
        torch.cuda.current_stream().wait_event(self.done)
        return self.y


class Beside:
    """Of one rank: a stream beside the step's, also while that is captured."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)

    def run(self, work: Callable[..., Tensor], *read: Tensor) -> GpuSum:
        """work(*read), once what was launched in the current stream is done."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            y = work(*read)
        return GpuSum(y, self._stream.record_event(), read)


class GpuShare:
    """Of one layer's experts in host memory: what the GPU computes, and what the CPU has to know of its own part."""

    def __init__(self, layer: HostExperts, units: int, stack: Experts, beside: Beside):
        """units: that the CPU computes, the first ones. stack: of the others, as the GPU sees it in host memory."""
        self.units, self.stack, self._beside = units, stack, beside
        self.cpu_biases = split_experts.biases_of(layer.host_biases, 0, units)
        hosted = Biases(*(None if one is None else one[: layer.held.size] for one in layer.biases))
        biases = split_experts.biases_of(hosted, units, layer.layer.stack.w2.shape[2])
        self._act, self._biases, self._held = layer.act, biases, Held(0, stack.size, layer.held.total + 1)

    def compute(self, x: Tensor, numbers: Tensor, weights: Tensor) -> GpuSum:
        """numbers int32 [T, k]: each pair's expert, of those in host memory; where it is past their end, the pair is
        left out."""
        return self._beside.run(self._compute, x, numbers, weights)

    def _compute(self, x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        of = self._act, self._biases, self._held
        return fused_experts(Inputs(x, numbers, weights, self.stack.w13, self.stack.w2, *of))


def attach(layers: Sequence[HostExperts], dtype: torch.dtype, room: int | None) -> str:
    """Have CPU and GPU compute missing experts of these layers together, where that is faster: of all layers that can
    be cut alike, or of none, and as many units in each. room: free bytes of the host's memory; None: unlimited. What
    the log should say."""
    if not host_exchange.supports(layers[0].device):
        return ""
    some, unit = _alike(layers, dtype)
    if not some:
        return ""
    inner = _inner(some[0])
    units = split_experts.on_cpu(inner, unit, [one.few.choice.costs for one in some])
    if units == inner:
        return ""
    by_form = {one.layer.form: one.layer for one in some}
    layout_of = {form: _layout(layer, units) for form, layer in by_form.items()}
    layouts = [layout_of[one.layer.form] for one in some]
    need = sum(_nbytes(layout, one.layer.stack.size) for layout, one in zip(layouts, some, strict=True))
    if room is not None and need > HOST_SHARE * room:
        return (
            f"{NO_SHARE}: it would read {need / 1e9:.2f} GB more of the host's memory, which is more than "
            f"{HOST_SHARE:.0%} of the {room / 1e9:.2f} GB that are left there"
        )
    try:
        stacks = [_stack(one.layer, units, layout, one.device) for layout, one in zip(layouts, some, strict=True)]
    except HostMemoryError as error:
        return f"{NO_SHARE}: {error}"
    beside = Beside(some[0].device)
    for one, stack in zip(some, stacks, strict=True):
        one.few.share = GpuShare(one, units, stack, beside)
    return (
        f"experts that the CPU serves in steps of few tokens: in {len(some)} of {len(layers)} layers the GPU computes "
        f"{inner - units} of {inner} units of each, which it reads from host memory, {need / 1e9:.2f} GB more of it"
    )


def _alike(layers: Sequence[HostExperts], dtype: torch.dtype) -> tuple[list[HostExperts], int]:
    """Layers whose missing experts the CPU serves alone and that can be cut after as many units, and how many stay
    together in each of them. None in f32: what an expert makes must not depend on where its weights are."""
    alone = [one for one in layers if dtype != torch.float32 and one.few.serves_alone(dtype)]
    by_form = {one.layer.form: one.layer for one in alone}
    units = {form: split_experts.unit(Experts(*layer.first), dtype) for form, layer in by_form.items()}
    some = [one for one in alone if units[one.layer.form]]
    if not some:
        return [], 0
    inner = statistics.mode(map(_inner, some))
    some = [one for one in some if _inner(one) == inner]
    return some, math.lcm(*(units[one.layer.form] for one in some))


def _inner(layer: HostExperts) -> int:
    return layer.layer.stack.w2.shape[2]


def _layout(layer: HostStack, units: int) -> Layout:
    """Of the units from this one on, as kernels on GPUs read them."""
    first = split_experts.last_units(Experts(*map(gpu_form.of_gpu, layer.first)), units)
    return Layout([gpu_form.parts(one) for one in first])


def _nbytes(layout: Layout, experts: int) -> int:
    """Of what `_stack` pins: it begins at a border within it."""
    return layout.nbytes(experts) + host_memory.ALIGN


def _stack(layer: HostStack, units: int, layout: Layout, device: torch.device) -> Experts:
    """The units from this one on of all experts, in pinned memory, as the GPU sees it. Raises HostMemoryError."""
    experts = layer.stack.size
    room = host_memory.zeros((_nbytes(layout, experts),), torch.uint8, pin=True)
    if not room.is_pinned():
        raise HostMemoryError(f"{room.nbytes / 1e6:.1f} MB of host memory could not be pinned")
    begin = -room.data_ptr() % host_memory.ALIGN
    memory = room[begin : begin + layout.nbytes(experts)]
    to = layout.carve(memory, experts)
    at_once = max(1, gpu_form.CHUNK // layer.here.nbytes(1))
    wholes = [gpu_form.parts(one) for one in layer.stack]
    for first in range(0, experts, at_once):
        some = slice(first, min(first + at_once, experts))
        whole = Experts(*(gpu_form.of_gpu(one.of([x[some].to(device) for x in one.tensors])) for one in wholes))
        for part, target in zip(split_experts.last_units(whole, units), to.parts, strict=True):
            for x, y in zip(target.tensors, gpu_form.parts(part).tensors, strict=True):
                x[some].copy_(y)
    return layout.carve(host_memory.on_gpu(memory), experts).stack
