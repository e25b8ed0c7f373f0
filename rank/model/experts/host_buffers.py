"""Memory on the way between host and device that a rank's layers share, as they are computed one after the other."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from ....kernels import host_memory
from ....kernels.moe.host_experts import Experts, HostRouted, Round
from ....kernels.moe.moe import Biases
from ....kernels.quantized import gpu_layout

KEPT = 16  # tokens of steps whose operations are kept


class HostWork:
    """The CPU's computation on views that share their memory: operations are kept, for steps of as small batches."""

    def __init__(self) -> None:
        self._pairs: dict[Hashable, HostRouted] = {}  # which one layer after the other fills
        self._kept: dict[Hashable, Round] = {}

    def of(self, layer: HostStack, at: Tensor, routed: Callable[[], HostRouted], biases: Biases, out: Tensor) -> Round:
        """`HostRouted.all_calls` of one layer, always the same for as many tokens. routed: makes them."""
        key = id(layer), len(out)
        if key not in self._kept:
            of = layer.form, len(out)
            if of not in self._pairs:
                self._pairs[of] = routed()
            self._pairs[of].biases = biases
            self._kept[key] = self._pairs[of].all_calls(layer.stack, at, out)
        return self._kept[key]


class HostView:
    """A step's tokens on their way: pinned memory, and memory on the GPU that stays where it is."""

    def __init__(self, host: list[Tensor], on_device: list[Tensor], made: Tensor, out: Tensor, work: HostWork):
        self.x, self.ids, self.weights = host
        self.on_device = on_device  # the same there
        self.work = work
        self.made, self.out = made, out  # [T, H] f32, on the host and there
        self._sent = torch.cuda.Event()

    def send(self, *parts: Tensor) -> None:
        """x, ids and weights, from the device to the host."""
        for here, there, given in zip((self.x, self.ids, self.weights), self.on_device, parts, strict=True):
            there.copy_(given)
            here.copy_(there, non_blocking=True)

    def sent(self, _: int) -> None:
        """They are on their way: what is launched later need not be waited for."""
        self._sent.record()

    def wait(self, fresh: bool) -> None:
        """Until they are here. fresh: `sent` was not called."""
        if fresh:
            self._sent.record()
        self._sent.synchronize()


class Views:
    """Views of memory that grows with the longest step."""

    def __init__(self) -> None:
        self._views: dict[int, HostView] = {}
        self._rows = 0

    def view(self, x: Tensor, ids: Tensor) -> HostView:
        """For as many tokens as these."""
        if len(x) > self._rows:  # what graphs were captured with before stays theirs
            self._rows = len(x)
            self._views.clear()
            self._make(x, ids)
        if len(x) not in self._views:
            host, there, made, out, work = self._whole
            n = len(x)
            cut = [one[:n] for one in host], [one[:n] for one in there]
            self._views[n] = HostView(*cut, made[:n], out[:n], work)
        return self._views[len(x)]

    def _make(self, x: Tensor, ids: Tensor) -> None:
        shapes = ((*x.shape,), x.dtype), ((*ids.shape,), torch.int32), ((*ids.shape,), torch.float32)
        host = [host_memory.zeros(shape, dtype, pin=True) for shape, dtype in shapes]
        there = [torch.zeros(shape, dtype=dtype, device=x.device) for shape, dtype in shapes]
        made = host_memory.zeros((*x.shape,), torch.float32, pin=True)
        host_memory.check_pinned("experts in host memory", (*host, made))
        # Rows of captured steps that are padding are never filled: zeros do no harm.
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        self._whole = host, there, made, out, HostWork()


class HostStack:
    """A layer's experts in host memory, and the form in which kernels on the device read them."""

    def __init__(self, stack: Experts, device: torch.device):
        self.stack = stack
        mine = [gpu_layout.parts(one) for one in stack]
        self.tensors = [x for part in mine for x in part.tensors]  # [E, ...] each
        self.first = first = [part.of([x[:1] for x in part.tensors]) for part in mine]  # expert 0
        made = [gpu_layout.repack_for_gpu(one) for one in first] if device.type == "cuda" else first
        self.same = all(a is b for a, b in zip(first, made, strict=True))  # on the device
        self.here, self.there = Layout(mine), Layout([gpu_layout.parts(one) for one in made])

    @property
    def form(self) -> Hashable:
        """Equal of layers whose experts look alike."""
        return self.here.key, self.there.key


class Layout:
    """How the tensors of some experts of one form lie in memory."""

    def __init__(self, parts: list[gpu_layout.Parts]):
        self._parts = parts

    @property
    def key(self) -> Hashable:
        return tuple(part.key for part in self._parts)

    def nbytes(self, count: int) -> int:
        """Bytes of so many experts, each tensor aligned on its own."""
        return sum(host_memory.aligned(count * x[0].nbytes) for part in self._parts for x in part.tensors)

    def carve(self, memory: Tensor, count: int) -> Buffer:
        """memory: uint8, at least `nbytes`."""
        at, made = 0, []
        for part in self._parts:
            some = []
            for x in part.tensors:
                size = count * x[0].nbytes
                some.append(memory[at : at + size].view(x.dtype).view(count, *x.shape[1:]))
                at += host_memory.aligned(size)
            made.append(gpu_layout.Parts(some, part.of(some)))
        return Buffer(Experts(*(one.stack for one in made)), made)

    def empty(self, count: int, device: torch.device) -> Buffer:
        return self.carve(torch.zeros(self.nbytes(count), dtype=torch.uint8, device=device), count)


class Buffer(NamedTuple):
    """Room for some experts on the device."""

    stack: Experts
    parts: list[gpu_layout.Parts]  # the same, whose tensors are [n, ...]

    @property
    def tensors(self) -> list[Tensor]:
        return [x for part in self.parts for x in part.tensors]
