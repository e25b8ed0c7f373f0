"""Copies experts from host memory to the device, a few at a time, while the device computes others.

On a GPU two CUDA streams work next to the step's: one only copies, the other makes what came over into the form that
kernels read, where that differs. Each has two buffers in turn. A copy waits for nothing but its buffer, and is launched
as soon as the host comes to it, which is long before the GPU does in a step of many tokens. So the first copies of a
layer run while the layer before computes its last experts, and the attention between, and PCIe does not idle.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....kernels.moe import nibble_permutation
from ....kernels.moe.moe import Matrices
from ....kernels.moe.nibble_permutation import Permutation
from ....kernels.quantized import gpu_layout
from .host_buffers import Buffer, HostStack

BUFFER = 96 << 20  # bytes of a buffer of experts
BUFFERS = 4  # that there are at most: two, and two more where experts change their form


class Stage(NamedTuple):
    """A buffer as experts come over, and as kernels read them: the same where these are alike."""

    raw: Buffer
    ready: Buffer


class _Streams:
    """CUDA streams of a GPU in addition the step's own."""

    def __init__(self, device: torch.device):
        self.copying, self.making = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.raw_read = [torch.cuda.Event() for _ in range(2)]  # by turn: recorded after the buffer's last reader
        self.ready_read = [torch.cuda.Event() for _ in range(2)]


class Streamer:
    """Streams experts to one rank: all its layers share the buffers, one after the other."""

    def __init__(self, layers: Sequence[HostStack], device: torch.device):
        """layers: all that are copied from; the buffers are large enough for one expert of any."""
        self.device = device
        self._size = max(BUFFER, *(max(one.here.nbytes(1), one.there.nbytes(1)) for one in layers))
        wanted = max(max(one.here.nbytes(one.stack.size), one.there.nbytes(one.stack.size)) for one in layers)
        self._size = min(self._size, wanted)
        changes = not all(one.same for one in layers)
        self._memory = [torch.zeros(self._size, dtype=torch.uint8, device=device) for _ in range(2 + 2 * changes)]
        self._stages: dict[Hashable, list[Stage]] = {}
        self._permutation: dict[Hashable, list[Permutation | None]] = {}
        self._streams = _Streams(device) if device.type == "cuda" else None
        self._turn = 0
        self._lent = False  # whether what was launched in the step's own stream uses the first buffer

    def at_once(self, layer: HostStack) -> int:
        """How many of the layer's experts a buffer holds."""
        one = max(layer.here.nbytes(1), layer.there.nbytes(1))
        return max(1, min(layer.stack.size, self._size // one))

    def copies(self, layer: HostStack, experts: np.ndarray) -> Iterator[tuple[np.ndarray, Buffer]]:
        """Some of the experts, and a buffer whose first ones they are; valid until the next but one."""
        experts, count = np.sort(experts), self.at_once(layer)
        for start in range(0, len(experts), count):
            some = experts[start : start + count]
            self._turn ^= 1
            turn, stage = self._turn, self._stage(layer, self._turn)
            if self._streams is None:
                _copy(stage.raw, layer, some)
                self._make(stage.raw, _tensors(stage.ready), layer, len(some))
                yield some, stage.ready
            else:
                self._launch(self._streams, stage, turn, layer, some)
                yield some, stage.ready
                (self._streams.raw_read if layer.same else self._streams.ready_read)[turn].record()

    def lend(self, layer: HostStack) -> Stage:
        """The first buffer, for what is launched in the step's own stream."""
        return self._stage(layer, 0)

    def lent(self) -> None:
        """Something that uses the first buffer was launched there."""
        self._lent = True

    def repacks(self, layer: HostStack) -> bool:
        """Whether `repack` takes its experts."""
        return layer.same or all(permutation is not None for permutation in self._permutations_of(layer))

    def permutations(self, layer: HostStack) -> list[Permutation | None]:
        """How each of its tensors is repacked; None: it stays as it is. Empty where one is repacked by torch."""
        if layer.same:
            return [None] * len(layer.tensors)
        return self._permutations_of(layer) if self.repacks(layer) else []

    def repack(self, layer: HostStack, most: int, count: Tensor) -> None:
        """The first of the first buffer, count [1] of them and `most` at most, in the current stream."""
        if layer.same:
            return
        stage = self._stage(layer, 0)
        for part, to, permutation in zip(stage.raw.parts, stage.ready.parts, self._permutations_of(layer), strict=True):
            assert permutation is not None, "`repacks` was not asked"
            nibble_permutation.permute(permutation, part.tensors[0][:most], to.tensors[0][:most], count)

    def replace(self, slots: Buffer, slot: int, layer: HostStack, expert: int) -> None:
        """Copy an expert into a slot, after what was launched and before what will be."""
        to = [[x[slot : slot + 1] for x in some] for some in _tensors(slots)]
        if self._streams is None:
            return self._replace(to, layer, expert)
        stream, step = self._streams.copying, torch.cuda.current_stream()
        stream.wait_stream(step)
        with torch.cuda.stream(stream):
            self._replace(to, layer, expert)
        step.wait_stream(stream)
        return None

    def _stage(self, layer: HostStack, turn: int) -> Stage:
        if layer.form not in self._stages:
            count = self.at_once(layer)
            raw = [layer.here.carve(one, count) for one in self._memory[:2]]
            ready = raw if layer.same else [layer.there.carve(one, count) for one in self._memory[2:]]
            self._stages[layer.form] = [Stage(*both) for both in zip(raw, ready, strict=True)]
        return self._stages[layer.form][turn]

    def _launch(self, streams: _Streams, stage: Stage, turn: int, layer: HostStack, experts: np.ndarray) -> None:
        """Have the stage filled, and the current stream wait until it is."""
        copying, making, step = streams.copying, streams.making, torch.cuda.current_stream()
        if self._lent:
            copying.wait_stream(step)
            making.wait_stream(step)
            self._lent = False
        copying.wait_event(streams.raw_read[turn])
        with torch.cuda.stream(copying):
            _copy(stage.raw, layer, experts)
        if layer.same:
            step.wait_stream(copying)
            return
        making.wait_stream(copying)
        making.wait_event(streams.ready_read[turn])
        with torch.cuda.stream(making):
            self._make(stage.raw, _tensors(stage.ready), layer, len(experts))
            streams.raw_read[turn].record()
        step.wait_stream(making)

    def _replace(self, to: list[list[Tensor]], layer: HostStack, expert: int) -> None:
        given = [x[expert : expert + 1] for x in layer.tensors]
        if layer.same:
            _put([x for some in to for x in some], given)
            return
        raw = self._stage(layer, 0).raw
        _put([x[:1] for x in raw.tensors], given)
        self._make(raw, to, layer, 1)

    def _make(self, raw: Buffer, to: list[list[Tensor]], layer: HostStack, count: int) -> None:
        """The first experts of `raw` as kernels read them: into the first of `to`, each matrix's tensors."""
        if layer.same:
            return
        step = max(1, gpu_layout.CHUNK // layer.here.nbytes(1))
        for part, target, permutation in zip(raw.parts, to, self._permutations_of(layer), strict=True):
            if permutation is not None:
                nibble_permutation.permute(permutation, part.tensors[0][:count], target[0][:count])
                continue
            for first in range(0, count, step):
                some = slice(first, min(first + step, count))
                _put([x[some] for x in target], _repacked(part, [x[some] for x in part.tensors]))

    def _permutations_of(self, layer: HostStack) -> list[Permutation | None]:
        if layer.form not in self._permutation:
            self._permutation[layer.form] = [_permutation(one, self.device) for one in layer.first]
        return self._permutation[layer.form]


def _tensors(buffer: Buffer) -> list[list[Tensor]]:
    return [part.tensors for part in buffer.parts]


def _permutation(one: Matrices, device: torch.device) -> Permutation | None:
    """How one expert, and so each like it, is repacked; None: by torch."""
    part = gpu_layout.parts(one)
    if len(part.tensors) != 1 or len(gpu_layout.parts(gpu_layout.repack_for_gpu(one)).tensors) != 1:
        return None
    return nibble_permutation.find(lambda x: _repacked(part, [x])[0], part.tensors[0].to(device))


def _repacked(part: gpu_layout.Parts, tensors: list[Tensor]) -> list[Tensor]:
    """Repacks some experts that lie as those of `part`, for kernels of GPUs."""
    return gpu_layout.parts(gpu_layout.repack_for_gpu(part.of(tensors))).tensors


def _put(target: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    for mine, theirs in zip(target, source, strict=True):
        mine.copy_(theirs, non_blocking=True)


def _copy(raw: Buffer, layer: HostStack, experts: np.ndarray) -> None:
    """Copies these experts, in ascending order, to the front of the buffer: neighbours in one copy, as each costs the
    host some microseconds."""
    borders = [0, *(np.flatnonzero(np.diff(experts) != 1) + 1).tolist(), len(experts)]
    for first, last in zip(borders, borders[1:], strict=False):
        begin = int(experts[first])
        _put([x[first:last] for x in raw.tensors], [x[begin : begin + last - first] for x in layer.tensors])
