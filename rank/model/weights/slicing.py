"""Which piece of which checkpoint tensor goes where: one description for every kind of layer and weight format."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from ....kernels.gemm.linear import pack
from ..layers.shard import Shard


class Field(NamedTuple):
    """One tensor of a layer as checkpoints store it."""

    name: str
    axes: str  # one letter per axis: "o" runs along the layer's outputs, "i" along its inputs


class Source(NamedTuple):
    """Where checkpoints hold one of a layer's outputs."""

    path: str  # of the tensors, without the field's name
    start: int = 0  # first of the outputs, in a tensor that holds several of them
    size: int = 0  # outputs of that tensor; 0: it holds this one alone


class ShardedModule(nn.Module):
    """A layer with weights, cut for this rank. Checkpoints may hold each of several outputs apart.

    Parameters are made on the meta device; loading gives them their device and dtype.
    """

    fields: tuple[Field, ...]
    sources: tuple[Source, ...] = ()  # one per output; empty: what fills another module fills this one
    outputs: tuple[Shard, ...]
    inputs: Shard

    def finish(self) -> None:
        """Called once when all of the layer is loaded: bring the weights into the form that is computed with."""


def pack_weight(layer: ShardedModule) -> None:
    """Replace `weight` by its packed form, if it has one on this device. A tied layer's own `weight` stays."""
    plain = layer.get_parameter("weight")
    packed = pack(plain)
    if packed is not plain:
        del layer.weight
        layer.register_buffer("weight", packed, persistent=False)


@dataclass(frozen=True, slots=True)
class Slice:
    """`tensor[ranges]` of a checkpoint fills a part of the same shape of a module's parameter."""

    tensor: str
    shape: tuple[int, ...]  # of the whole tensor
    ranges: tuple[tuple[int, int], ...]
    module: ShardedModule
    field: str
    starts: tuple[int, ...]  # where the part begins in the parameter

    @property
    def numel(self) -> int:
        return math.prod(stop - start for start, stop in self.ranges)

    @property
    def target(self) -> Tensor:
        """The part of the parameter as it is now."""
        target = self.module.get_parameter(self.field).data
        for axis, ((start, stop), at) in enumerate(zip(self.ranges, self.starts, strict=True)):
            target = target.narrow(axis, at, stop - start)
        return target


def slices(layer: ShardedModule) -> Iterator[Slice]:
    """All that fills one layer's parameters."""
    for field in layer.fields if layer.sources else ():
        if getattr(layer, field.name) is None:  # no bias
            continue
        offset = 0
        for source, outputs in zip(layer.sources, layer.outputs, strict=True):
            shape, ranges, starts = [], [], []
            for axis in field.axes:
                shard, first, at = (outputs, source.start, offset) if axis == "o" else (layer.inputs, 0, 0)
                shape.append(source.size if axis == "o" and source.size else shard.size)
                ranges.append((first + shard.start, first + shard.stop))
                starts.append(at)
            name = f"{source.path}.{field.name}"
            yield Slice(name, tuple(shape), tuple(ranges), layer, field.name, tuple(starts))
            offset += outputs.width
