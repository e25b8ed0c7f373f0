"""Says which slice of which checkpoint tensor fills which part of a parameter, for all layers and weight formats."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ....kernels.gemm.linear import pack
from ..shard import Shard


class Field(NamedTuple):
    """One tensor of a module, as checkpoints store it."""

    name: str
    axes: str  # one letter an axis: "o" for the module's outputs, "i" for its inputs, "e", the first, for its experts
    dtype: torch.dtype | None = None  # None: the model's
    stored: bool = False  # it is read in the checkpoint's dtype, for `finish` to encode; others in the model's


class Source(NamedTuple):
    """Where a checkpoint holds one of a module's outputs."""

    path: str  # the tensors' names without the field's name; {} for the number of an expert that has its own tensors
    start: int = 0  # offset of this output in a tensor that holds several
    size: int = 0  # size of that tensor's output axis; 0: it holds this output alone


class ShardedModule(nn.Module):
    """A module with weights, sharded for this rank. Checkpoints may hold each of its outputs in another tensor.

    Its parameters are made on the meta device. Loading gives them their device and dtype.
    """

    fields: tuple[Field, ...]
    sources: tuple[Source, ...] = ()  # one per output; empty: another module fills the shared parameters
    outputs: tuple[Shard, ...]
    inputs: Shard
    experts: Shard  # of modules that stack the weights of several experts

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """A parameter's dtype in a model of this dtype."""
        return next((field.dtype for field in self.fields if field.name == name and field.dtype), dtype)

    def finish(self) -> None:
        """Convert the weights to the form that kernels use. Called once, when all of them are loaded."""

    @property
    def shared(self) -> bool:
        """Whether its weights are another module's."""
        return not self.sources

    def kept_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of its weights once they are loaded, in a model of this dtype. Asked before they are."""
        held = self.named_parameters(recurse=False)
        return sum(parameter.numel() * self.dtype_of(name, dtype).itemsize for name, parameter in held)

    def plain_bytes(self, stored: torch.dtype) -> int:
        """Bytes that `finish` gives back: of weights that it encodes, which the checkpoint holds in this dtype."""
        return 0


def pack_weight(layer: ShardedModule) -> None:
    """Replace `weight` by its packed form, if this device has one. The module that it is tied to keeps its own."""
    plain = layer.get_parameter("weight")
    packed = pack(plain)
    if packed is not plain:
        del layer.weight
        layer.register_buffer("weight", packed, persistent=False)


@dataclass(frozen=True, slots=True)
class Slice:
    """`tensor[ranges]` of a checkpoint fills a part of a module's parameter, or of one expert's in it."""

    tensor: str
    shape: tuple[int, ...]  # of the whole tensor
    ranges: tuple[tuple[int, int], ...]
    module: ShardedModule
    field: str
    starts: tuple[int, ...]  # where the part begins in the parameter
    expert: int | None = None  # its index in the parameter, where the tensor is of one expert and lacks that axis

    @property
    def numel(self) -> int:
        return math.prod(stop - start for start, stop in self.ranges)

    @property
    def target(self) -> Tensor:
        """The part of the parameter, in its present memory."""
        target = self.module.get_parameter(self.field).data
        if self.expert is not None:
            target = target[self.expert]
        for axis, ((start, stop), at) in enumerate(zip(self.ranges, self.starts, strict=True)):
            target = target.narrow(axis, at, stop - start)
        return target


def slices(layer: ShardedModule) -> Iterator[Slice]:
    """The slices that fill one module's parameters."""
    for field in layer.fields if layer.sources else ():
        if getattr(layer, field.name) is None:  # no bias
            continue
        offset = 0
        for source, outputs in zip(layer.sources, layer.outputs, strict=True):
            for number in range(layer.experts.start, layer.experts.stop) if "{}" in source.path else (None,):
                shape, ranges, starts = [], [], []
                for axis in field.axes if number is None else field.axes.removeprefix("e"):
                    shard = outputs if axis == "o" else layer.inputs if axis == "i" else layer.experts
                    first, at = (source.start, offset) if axis == "o" else (0, 0)
                    shape.append(source.size if axis == "o" and source.size else shard.size)
                    ranges.append((first + shard.start, first + shard.stop))
                    starts.append(at)
                name = f"{source.path}.{field.name}".replace("{}", str(number))
                index = None if number is None else number - layer.experts.start
                yield Slice(name, tuple(shape), tuple(ranges), layer, field.name, tuple(starts), index)
            offset += outputs.width
