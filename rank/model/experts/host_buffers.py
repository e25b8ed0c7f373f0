"""Memory on the way between host and device that a rank's layers share, as they are computed one after the other."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....kernels import host_memory
from ....kernels.cpp import ops
from ....kernels.moe.host_experts import Experts, HostPairs
from ....kernels.moe.moe import Biases
from ....kernels.quantized import gpu_form

BUFFER = 96 << 20  # bytes of a buffer of experts
BUFFERS = 4  # that there are at most: two, and two more where experts change their form
KEPT = 16  # tokens of steps whose operations are kept


class Kept(NamedTuple):
    """Operations as C++ takes them."""

    packed: ctypes.Array[Any]
    calls: ops.Calls  # whose tensors they read


class HostWork:
    """What the CPU computes of views that share their memory: operations are kept, for steps of as few tokens."""

    def __init__(self) -> None:
        self._pairs: dict[Hashable, HostPairs] = {}  # which one layer after the other fills
        self._kept: dict[Hashable, Kept] = {}

    def run(self, layer: HostStack, at: Tensor, pairs: Callable[[], HostPairs], biases: Biases, out: Tensor) -> None:
        """`HostPairs.all_calls` of one layer, always the same for as many tokens. pairs: makes them."""
        key = id(layer), len(out)
        if key not in self._kept:
            of = layer.form, len(out)
            if of not in self._pairs:
                self._pairs[of] = pairs()
            self._pairs[of].biases = biases
            calls = self._pairs[of].all_calls(layer.stack, at, out)
            packed = ops.call_array([(one.address, ops.pack(values)) for one, values in calls])
            self._kept[key] = Kept(packed, calls)
        kept = self._kept[key]
        ops.run_calls(kept.packed, len(kept.calls), torch.get_num_threads())


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


class SharedBuffers:
    """Of one rank with a GPU."""

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
        mine = [gpu_form.parts(one) for one in stack]
        self.tensors = [x for part in mine for x in part.tensors]  # [E, ...] each
        first = [part.of([x[:1] for x in part.tensors]) for part in mine]
        made = [gpu_form.of_gpu(one) for one in first] if device.type == "cuda" else first
        self.same = all(a is b for a, b in zip(first, made, strict=True))  # on the device
        self.here, self.there = Layout(mine), Layout([gpu_form.parts(one) for one in made])

    @property
    def form(self) -> Hashable:
        """Equal of layers whose experts look alike."""
        return self.here.key, self.there.key


class Layout:
    """How the tensors of some experts of one form lie in memory."""

    def __init__(self, parts: list[gpu_form.Parts]):
        self._parts = parts

    @property
    def key(self) -> Hashable:
        return tuple(part.key for part in self._parts)

    def nbytes(self, count: int) -> int:
        """Of so many experts, each tensor on a border of its own."""
        return sum(host_memory.aligned(count * x[0].nbytes) for part in self._parts for x in part.tensors)

    def carve(self, memory: Tensor, count: int) -> Buffer:
        """memory: uint8, at least `nbytes`."""
        at, made, tensors = 0, [], []
        for part in self._parts:
            some = []
            for x in part.tensors:
                size = count * x[0].nbytes
                some.append(memory[at : at + size].view(x.dtype).view(count, *x.shape[1:]))
                at += host_memory.aligned(size)
            made.append(part.of(some))
            tensors += some
        return Buffer(Experts(*made), tensors)

    def empty(self, count: int, device: torch.device) -> Buffer:
        return self.carve(torch.zeros(self.nbytes(count), dtype=torch.uint8, device=device), count)


class Buffer(NamedTuple):
    """Room for some experts on the device."""

    stack: Experts
    tensors: list[Tensor]  # the same: [n, ...] each


class Stage(NamedTuple):
    """A buffer as experts come over, and as kernels read them: the same where these are alike."""

    raw: Buffer
    ready: Buffer


class Streamer:
    """Copies experts to the device: into two buffers in turn, by a CUDA stream of its own where it is a GPU."""

    def __init__(self, layers: Sequence[HostStack], device: torch.device):
        """layers: all that are copied from; the buffers are large enough for one expert of any."""
        self.device = device
        self._size = max(BUFFER, *(max(one.here.nbytes(1), one.there.nbytes(1)) for one in layers))
        wanted = max(max(one.here.nbytes(one.stack.size), one.there.nbytes(one.stack.size)) for one in layers)
        self._size = min(self._size, wanted)
        changes = not all(one.same for one in layers)
        self._memory = [torch.zeros(self._size, dtype=torch.uint8, device=device) for _ in range(2 + 2 * changes)]
        single = max(one.here.nbytes(1) for one in layers)
        self._single = torch.zeros(single if changes else 0, dtype=torch.uint8, device=device)
        self._stages: dict[Hashable, list[Stage]] = {}
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None
        self._free = [torch.cuda.Event() for _ in range(2)] if cuda else []
        self._turn = 0

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (*self._memory, self._single))

    def at_once(self, layer: HostStack) -> int:
        """How many of the layer's experts a buffer holds."""
        one = max(layer.here.nbytes(1), layer.there.nbytes(1))
        return max(1, min(layer.stack.size, self._size // one))

    def _stage(self, layer: HostStack) -> Stage:
        if layer.form not in self._stages:
            count = self.at_once(layer)
            raw = [layer.here.carve(one, count) for one in self._memory[:2]]
            ready = raw if layer.same else [layer.there.carve(one, count) for one in self._memory[2:]]
            self._stages[layer.form] = [Stage(*both) for both in zip(raw, ready, strict=True)]
        return self._stages[layer.form][self._turn]

    def copies(self, layer: HostStack, experts: np.ndarray) -> Iterator[tuple[np.ndarray, Buffer]]:
        """Some of the experts, and a buffer whose first ones they are; valid until the next but one."""
        count = self.at_once(layer)
        for start in range(0, len(experts), count):
            some = experts[start : start + count]
            self._turn ^= 1
            stage = self._stage(layer)
            if self._stream is None:
                _bring(stage, layer, some)
                yield some, stage.ready
                continue
            free = self._free[self._turn]
            self._stream.wait_event(free)
            with torch.cuda.stream(self._stream):
                _bring(stage, layer, some)
            torch.cuda.current_stream().wait_stream(self._stream)
            yield some, stage.ready
            free.record()

    def replace(self, slots: Buffer, slot: int, layer: HostStack, expert: int) -> torch.cuda.Event | None:
        """Copy an expert into a slot that nothing launched later reads. When it is there; None: it is."""
        to = [x[slot : slot + 1] for x in slots.tensors]
        if self._stream is None:
            self._put_one(to, layer, expert)
            return None
        self._stream.wait_stream(torch.cuda.current_stream())
        done = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            self._put_one(to, layer, expert)
            done.record()
        return done

    def _put_one(self, to: list[Tensor], layer: HostStack, expert: int) -> None:
        given = [x[expert : expert + 1] for x in layer.tensors]
        if not layer.same:
            one = layer.here.carve(self._single, 1)
            _put(one.tensors, given)
            given = _made_over(one.stack)
        _put(to, given)


def _put(target: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    for mine, theirs in zip(target, source, strict=True):
        mine.copy_(theirs, non_blocking=True)


def _bring(stage: Stage, layer: HostStack, experts: np.ndarray) -> None:
    """These experts become the first of the buffer."""
    for index, expert in enumerate(experts.tolist()):
        _put([x[index] for x in stage.raw.tensors], [x[expert] for x in layer.tensors])
    if layer.same:
        return
    step = max(1, gpu_form.CHUNK // layer.here.nbytes(1))
    for first in range(0, len(experts), step):
        part = slice(first, min(first + step, len(experts)))
        some = [gpu_form.parts(one) for one in stage.raw.stack]
        made = Experts(*(one.of([x[part] for x in one.tensors]) for one in some))
        _put([x[part] for x in stage.ready.tensors], _made_over(made))


def _made_over(stack: Experts) -> list[Tensor]:
    return [x for one in stack for x in gpu_form.parts(gpu_form.of_gpu(one)).tensors]
