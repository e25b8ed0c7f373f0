"""Embedding tables and weights of whole layers in host memory (`--cpu-offload-gb`).

Tables that no head reads come first: a kernel reads the rows of a step's tokens where they lie, in captured steps, too.
Layers are copied to the device while the layers before compute.

Layers share slots on the device: the tensors of the k-th layer of those in host memory lie in slot k % slots, always at
the same addresses, so CUDA graphs may hold them. A CUDA stream of its own copies a layer there as soon as the one that
had the slot is computed; the step waits for the copy where the layer begins. Captured steps have the copies in them.

A layer's last linear is computed in the next layer, as its sum is fused with the norm there. So a slot is free once the
next layer is computed, too: two slots do where no two neighbours are in host memory, else there are three. The same
holds for two microbatches, of which one is at most a sublayer ahead.

Norms, experts and what latent attention absorbs stay on the device.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from ...errors import MEMORY, FatalError
from ...kernels import host_memory
from .. import layer_slots
from .formats._packed import PackedPart
from .formats._part import Part
from .layers.embedding import VocabParallelEmbedding
from .layers.linear import Linear
from .layers.mla import PlainColumnParallel
from .weights.slicing import ShardedModule

T = TypeVar("T")
ROUNDS = 3


class _Copy(NamedTuple):
    host: Tensor
    slot: Tensor  # where it goes on the device


class LayerOffload:
    """Layer offload of one rank: made before the weights are loaded; `park` takes each part as it is loaded, then comes
    `attach`. Tables are loaded where they stay."""

    def __init__(
        self,
        layers: dict[int, nn.Module],
        tables: Iterable[VocabParallelEmbedding],
        size: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        """layers: of this stage, by their index. tables: of this stage. size: bytes of their weights that may be in
        host memory at most; the layers that are taken lie as far apart as they can."""
        self.device, self.layers = device, len(layers)
        reached = device.type != "cuda" or host_memory.in_reach(device)
        untied = [table for table in tables if not table.tied]
        free, self._out_of_reach = (untied, False) if reached else ([], bool(untied))
        held = [(table.part or table).kept_bytes(dtype, device) for table in free]
        taken = layer_slots.choose_tables(held, size)
        self._tables = [free[place] for place in taken]
        for table in self._tables:
            table.in_host = device.type == "cuda"  # elsewhere it lies there anyway
        self.table_bytes = sum(held[place] for place in taken)
        size -= self.table_bytes
        parts = {index: list(_parts(layer)) for index, layer in layers.items()}
        sizes = {index: sum(part.kept_bytes(dtype, device) for part in some) for index, some in parts.items()}
        whole = list(layers)
        chosen = layer_slots.choose([sizes[index] for index in whole], size)
        order = [whole[place] for place in chosen]
        self._place = {index: number for number, index in enumerate(order)}
        self._parts = [parts[index] for index in order]
        self._chosen = {part for some in self._parts for part in some}
        self._slots = layer_slots.slots(chosen)
        self.host_bytes = sum(sizes[index] for index in order)
        self.slot_bytes = self._slots * max((sizes[index] for index in order), default=0)
        self._copies: list[list[_Copy]] = []  # of each layer in host memory
        self._stream: torch.cuda.Stream | None = None  # None: copies are made in the step's own
        self._there: list[torch.cuda.Event] = []  # recorded after each layer's copies
        self._begun, self._runs, self._left = 0, 1, Counter[int]()

    # -- loading

    def park(self, module: ShardedModule) -> None:
        """Move a part that has just been loaded to host memory, if it is one of those."""
        if module in self._chosen and self.device.type == "cuda":
            for tensor, put in list(_tensors(cast(Part, module))):
                put(host_memory.pinned(tensor))

    @property
    def copies_layers(self) -> bool:
        return bool(self._parts)

    def attach(self, aside: bool) -> list[str]:
        """Once all weights are loaded: give the layers their places on the device. Lines for the log.

        aside: copies have a CUDA stream of their own, which steps captured in segments cannot have. Raises FatalError
        where memory could not be pinned.
        """
        lines = []
        if self._out_of_reach:
            lines.append(
                "--cpu-offload-gb: embedding tables stay on the device, as this GPU does not read host memory by its "
                "address there"
            )
        if self._tables:
            if self.device.type == "cuda":
                host_memory.check_pinned("--cpu-offload-gb", (table.weight for table in self._tables))
            tables = f"{len(self._tables)} embedding table{'s are' if len(self._tables) > 1 else ' is'}"
            lines.append(f"{tables} in host memory, {self.table_bytes / 1e9:.4g} GB a rank; steps read rows there")
        if self._parts:
            lines.append(self._attach_layers(aside))
        return lines or ["--cpu-offload-gb: a table or a layer is more than that; all weights stay on the device"]

    def _attach_layers(self, aside: bool) -> str:
        whole = [[one for part in parts for one in _tensors(part)] for parts in self._parts]
        size = max(sum(host_memory.aligned(tensor.nbytes) for tensor, _ in tensors) for tensors in whole)
        slots = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(self._slots)]
        for number, tensors in enumerate(whole):
            at, copies = 0, []
            for host, put in tensors:
                slot_view = slots[number % self._slots][at : at + host.nbytes].view(host.dtype).view(host.shape)
                copies.append(_Copy(host, slot_view))
                put(slot_view)
                at += host_memory.aligned(host.nbytes)
            self._copies.append(copies)
        if self.device.type == "cuda":
            host_memory.check_pinned("--cpu-offload-gb", (host for tensors in whole for host, _ in tensors))
            self._stream = torch.cuda.Stream(self.device) if aside else None
        return self._told()

    def _told(self) -> str:
        sizes = [sum(copy.host.nbytes for copy in copies) for copies in self._copies]
        total, largest = sum(sizes), sizes.index(max(sizes))
        if not total:  # oneDNN's packed weights
            return "--cpu-offload-gb: on this machine no weights can be moved; all stay where they are"
        speed = sizes[largest] / max(min(self._seconds(largest) for _ in range(ROUNDS)), 1e-9)
        return (
            f"weights of {len(self._copies)} of {self.layers} layers are in host memory, {total / 1e9:.4g} GB a rank; "
            f"each step copies them at {speed / 1e9:.1f} GB/s, {total / speed * 1e3:.3g} ms: --cpu-offload-gb is a "
            "last resort; fewer bits (--isq) or more ranks (--tp, --pp) are faster"
        )

    def _seconds(self, number: int) -> float:
        """Seconds of one layer's copies."""
        started = time.perf_counter()
        self._copy(number)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def _copy(self, number: int) -> None:
        for host, slot in self._copies[number]:
            slot.copy_(host, non_blocking=True)

    # -- a step

    def begin(self, runs: int) -> None:
        """Begin the first copies of a step of so many microbatches."""
        self._begun, self._runs, self._left, self._there = 0, runs, Counter(), []
        self._fill(self._slots)

    def around(self, index: int, layer: Iterator[T]) -> Iterator[T]:
        """Run a layer of one microbatch."""
        if self._stream is not None and index in self._place:
            torch.cuda.current_stream().wait_event(self._there[self._place[index]])
        yield from layer
        self._left[index - 1] += 1
        if index - 1 in self._place and self._left[index - 1] == self._runs:
            self._fill(1)

    def _fill(self, slots: int) -> None:
        """Copy the next layers to so many slots that are free."""
        last = min(self._begun + slots, len(self._copies))
        if self._begun == last:
            return
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for number in range(self._begun, last):
                self._copy(number)
                if self._stream is not None:
                    self._there.append(self._stream.record_event())
        self._begun = last


def left_of_host(need: int, what: str, device: torch.device, room: int | None) -> int | None:
    """The host memory left where the device is a GPU. Raises FatalError where it is less than nothing."""
    if device.type != "cuda" or room is None:
        return room
    if need > room:
        raise FatalError(
            f"this rank's {what} take {need / 1e9:.2f} GB of the host's memory, but {room / 1e9:.2f} GB are free for "
            "it: use more ranks (--tp, --ep, --pp) or a node with more memory; `phalanx fit` shows what fits",
            MEMORY,
        )
    return room - need


def may_move(module: nn.Module) -> bool:
    """Whether it is a linear that may be in host memory."""
    return isinstance(module, Linear) and not isinstance(module, PlainColumnParallel)


def _parts(layer: nn.Module) -> Iterator[Part]:
    for one in layer.modules():
        if may_move(one):
            yield from cast(Iterable[Part], cast(Linear, one).parts)


def _tensors(part: Part) -> Iterator[tuple[Tensor, Callable[[Tensor], None]]]:
    """The tensors that a loaded part computes with, and what puts another in the place of each. oneDNN's packed ones
    stay where they are."""

    def parameter(name: str) -> Callable[[Tensor], None]:
        return lambda new: setattr(part, name, nn.Parameter(new, requires_grad=False))

    def field(packed: PackedPart, name: str) -> Callable[[Tensor], None]:
        return lambda new: packed.hold(cast(Any, packed.packed)._replace(**{name: new}))

    for name, tensor in part.named_parameters(recurse=False):
        if tensor.is_contiguous():
            yield tensor.data, parameter(name)
    if isinstance(part, PackedPart):
        for name, one in cast(Any, part.packed)._asdict().items():
            if isinstance(one, Tensor) and one.is_contiguous():
                yield one, field(part, name)
