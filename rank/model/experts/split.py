"""Experts that CPU and GPU compute together in steps of few tokens: the GPU reads its part where that lies.

Where the CPU serves all that is missing of a step (few_tokens.py), PCIe would idle. So the GPU has some of each
expert's intermediate units (kernels/moe/split_experts.py), which lie in host memory a second time, in the form of its
kernels. These read them from there, in a stream beside the step's, which has resident experts to compute meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ....errors import HostMemoryError
from ....kernels import host_memory
from ....kernels.moe import host_exchange, split_experts
from ....kernels.moe.host_choice import Costs
from ....kernels.moe.host_experts import Experts
from ....kernels.moe.moe import Biases, Held, Inputs, fused_experts
from ....kernels.quantized import gpu_form
from .host_buffers import HostStack, Layout

if TYPE_CHECKING:
    from .host import HostExperts

HOST_SHARE = 0.5  # of what is free of the host's memory, at most: who asks later, as for the cache, has the rest


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


def attach(layers: Sequence[HostExperts], costs: Mapping[Hashable, Costs], dtype: torch.dtype, room: int | None) -> str:
    """Have CPU and GPU compute missing experts of these layers together, where both are done sooner then. costs: of
    each form. room: free bytes of the host's memory; None: unlimited. What the log should say."""
    if not host_exchange.supports(layers[0].device):
        return ""
    planned = [(one, units) for one in layers if (units := _units(one, costs[one.layer.form], dtype))]
    need = sum(_layout(one.layer, units).nbytes(one.layer.stack.size) for one, units in planned)
    if not planned or (room is not None and need > HOST_SHARE * room):
        return ""
    try:
        stacks = [_stack(one.layer, units, one.device) for one, units in planned]
    except HostMemoryError as error:
        return f"the GPU computes no part of the experts that the CPU serves: {error}"
    beside = Beside(planned[0][0].device)
    for (one, units), stack in zip(planned, stacks, strict=True):
        one.few.share = GpuShare(one, units, stack, beside)
    first, units = planned[0]
    inner = first.layer.stack.w2.shape[2]
    return (
        f"experts that the CPU serves in steps of few tokens: the GPU computes {inner - units} of {inner} units of "
        f"each, which it reads from host memory, {need / 1e9:.2f} GB more of it"
    )


def _units(layer: HostExperts, costs: Costs, dtype: torch.dtype) -> int:
    """That the CPU computes; 0: it computes whole experts. In f32 it always does: what an expert makes must not depend
    on where its weights are."""
    if dtype == torch.float32 or not layer.few.serves_alone(dtype):
        return 0
    one = Experts(*layer.layer.first)
    inner = one.w2.shape[2]
    units = split_experts.on_cpu(inner, split_experts.unit(one, dtype), costs)
    return units if units < inner else 0


def _layout(layer: HostStack, units: int) -> Layout:
    """Of the units from this one on, as kernels on GPUs read them."""
    first = split_experts.last_units(Experts(*map(gpu_form.of_gpu, layer.first)), units)
    return Layout([gpu_form.parts(one) for one in first])


def _stack(layer: HostStack, units: int, device: torch.device) -> Experts:
    """The same of all experts in pinned memory, as the GPU sees it. Raises HostMemoryError."""
    layout, experts = _layout(layer, units), layer.stack.size
    size = layout.nbytes(experts)
    room = host_memory.zeros((size + host_memory.ALIGN,), torch.uint8, pin=True)
    if not room.is_pinned():
        raise HostMemoryError(f"{size / 1e6:.1f} MB of host memory could not be pinned")
    begin = -room.data_ptr() % host_memory.ALIGN
    memory = room[begin : begin + size]
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
