"""Says which slice of which checkpoint tensor fills which part of a parameter, for all layers and weight formats."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ....errors import USAGE, FatalError
from ....kernels.gemm.linear import pack
from ..shard import Shard, whole


class Ratio(NamedTuple):
    """How many entries a tensor stores along an axis for how many of the module's inputs or outputs.

    (1, 8): eight codes in each int32. (144, 256): super-blocks of 256 inputs, of 144 bytes each. (1, 128, True): a
    scale for each 128. (1, 0, True): one for the whole axis.
    """

    entries: int = 1
    elements: int = 1  # 0: all of the axis
    shared: bool = False  # as a scale, which holds for each of its elements: where a cut parts them, both ranks read it

    everywhere: bool = False  # every rank reads all of it

    def span(self, start: int, stop: int, size: int) -> tuple[int, int]:
        """First and last of the entries that hold elements start to stop, of an axis of `size`."""
        elements = self.elements or max(size, 1)
        if self.everywhere:
            start, stop = 0, size
        first = start * self.entries // elements
        return first, max(first, -(-stop * self.entries // elements)) if stop > start else first

    def parts(self, at: int, size: int) -> bool:
        """Whether a cut before element `at` would part what is stored as one."""
        return not self.shared and 0 < at < size and at % (self.elements or size) > 0


PLAIN = Ratio()
ONE = whole(1)  # the axis of a block


class Pattern(NamedTuple):
    """Dummy weights: among random bytes those that are not random, by their places in each block."""

    size: int  # bytes of a block
    bytes: Mapping[int, int]


class Turns(NamedTuple):
    """Dummy weights: entry i of the last axis is i % period."""

    period: int


class Codes(NamedTuple):
    """Dummy weights: packs of random codes of 4 or 8 bits, from `first` to `last`."""

    bits: int
    first: int
    last: int

    @property
    def variance(self) -> float:
        return ((self.last - self.first + 1) ** 2 - 1) / 12


class Scales(NamedTuple):
    """Dummy weights: the number by which weights get a deviation of 1 / sqrt(inputs)."""

    deviation: float  # of what it multiplies


class Field(NamedTuple):
    """One tensor of a module, as checkpoints store it."""

    name: str
    # One letter an axis: "o" for the module's outputs, "i" for its inputs, "e", the first, for its experts, "s", before
    # the others, for its sources where each has all of these entries, and any other, such as "b", for what stands for
    # one of the axis before, as many entries as its ratio.
    axes: str
    dtype: torch.dtype | None = None  # None: the model's
    stored: bool = False  # it is read in the checkpoint's dtype, for `finish` to encode; others in the model's
    ratios: Mapping[str, Ratio] = MappingProxyType({})  # of axes of other than one entry for each of theirs
    # The dummy contents of the tensor, or some of its bytes; None: random numbers.
    made_up: float | Pattern | Turns | Codes | Scales | None = None

    def ratio(self, axis: str) -> Ratio:
        return self.ratios.get(axis, PLAIN)


class Source(NamedTuple):
    """The place of one of a module's outputs in a checkpoint."""

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
    in_host = False  # its weights stay in the host's memory, whatever the device
    packed_there = False  # with in_host: read to the device, which packs them for the host
    borrows = False  # `finish` copies its parameters and drops them: until then they may be the file itself, mapped
    model_dtype: torch.dtype  # from when its parameters have memory

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """A parameter's dtype in a model of this dtype."""
        return next((field.dtype for field in self.fields if field.name == name and field.dtype), dtype)

    def finish(self) -> None:
        """Convert the weights to the form that kernels use. Called once, when all of them are loaded."""

    @property
    def shared(self) -> bool:
        """Whether its weights are another module's."""
        return not self.sources

    def kept_bytes(self, dtype: torch.dtype, device: torch.device) -> int:
        """Bytes of its weights once they are loaded there, in a model of this dtype. Asked before they are."""
        held = self.named_parameters(recurse=False)
        return sum(parameter.numel() * self.dtype_of(name, dtype).itemsize for name, parameter in held)

    def plain_bytes(self, stored: torch.dtype) -> int:
        """Bytes that `finish` gives back: of weights that it encodes, which the checkpoint holds in this dtype."""
        return 0


def parameter(*shape: int | tuple[int, ...], dtype: torch.dtype | None = None) -> nn.Parameter:
    """A parameter of a ShardedModule, without memory."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device="meta"), requires_grad=False)  # type: ignore[arg-type]


class Vector(ShardedModule):
    """A number for each of this rank's outputs."""

    fields: tuple[Field, ...] = (Field("weight", "o"),)

    def __init__(self, outputs: Shard):
        super().__init__()
        self.outputs = (outputs,)
        self.weight = parameter(outputs.width)


def pack_weight(layer: ShardedModule) -> None:
    """Replace `weight` by its packed form, if this device has one. The module that it is tied to keeps its own."""
    plain = layer.get_parameter("weight")
    packed = pack(plain)
    if packed is not plain:
        del layer.weight
        layer.register_buffer("weight", packed, persistent=False)


def stored_width(field: Field, axis: str, shard: Shard, source: Source) -> int:
    """Entries along an axis of the parameter that a rank's shard fills, with its padding."""
    ratio, first, size = field.ratio(axis), source.start if axis == "o" else 0, source.size or shard.size
    start, stop = ratio.span(first + shard.start, first + shard.start + shard.width, size)
    return min(stop - start, 1) if ratio.elements == 0 else stop - start


def axis_of(module: ShardedModule, axis: str) -> Shard:
    """The shard of an axis other than the outputs."""
    return module.inputs if axis == "i" else module.experts if axis == "e" else ONE


def stored_shape(module: ShardedModule, field: Field) -> tuple[int, ...]:
    """The shape of a parameter as its tensor stores it: what `slices` fill."""
    shape = []
    for axis in field.axes:
        if axis == "s":
            shape.append(len(module.sources))
        elif axis == "o":
            pairs = zip(module.outputs, module.sources, strict=True)
            shape.append(sum(stored_width(field, axis, shard, source) for shard, source in pairs))
        else:
            shard = axis_of(module, axis)
            shape.append(stored_width(field, axis, shard, Source("")))
    return tuple(shape)


def check_cuts(module: ShardedModule) -> None:
    """Raises FatalError where this rank's shard begins or ends within what a tensor stores as one."""
    for field in module.fields:
        cuts = [("inputs", "i", module.inputs, Source(module.sources[0].path))]
        cuts += [("outputs", "o", shard, source) for shard, source in zip(module.outputs, module.sources, strict=True)]
        for name, axis, shard, source in cuts:
            ratio, first, size = field.ratio(axis), source.start if axis == "o" else 0, source.size or shard.size
            if any(ratio.parts(first + at, size) for at in (shard.start, shard.stop)):
                raise FatalError(
                    f"{source.path}.{field.name} keeps groups of {ratio.elements or size} {name} together, and tensor "
                    f"parallelism leaves a rank {shard.width} of {shard.size}: choose another --tp",
                    USAGE,
                )


@dataclass(frozen=True, slots=True)
class Slice:
    """`tensor[ranges]` of a checkpoint fills a part of a module's parameter, or of one expert's in it."""

    tensor: str
    shape: tuple[int, ...]  # of the whole tensor
    ranges: tuple[tuple[int, int], ...]
    module: ShardedModule
    field: str
    starts: tuple[int, ...]  # where the part begins in the parameter
    index: tuple[int, ...] = ()  # of the tensor in the parameter's first axes, which it lacks: its expert, its source

    @property
    def spec(self) -> Field:
        """The tensor's field."""
        return next(field for field in self.module.fields if field.name == self.field)

    @property
    def numel(self) -> int:
        return math.prod(stop - start for start, stop in self.ranges)

    @property
    def target(self) -> Tensor:
        """The part of the parameter, in its present memory."""
        target = self.module.get_parameter(self.field).data[self.index]
        for axis, ((start, stop), at) in enumerate(zip(self.ranges, self.starts, strict=True)):
            target = target.narrow(axis, at, stop - start)
        return target


def slices(layer: ShardedModule) -> Iterator[Slice]:
    """The slices that fill one module's parameters."""
    for field in layer.fields if layer.sources else ():
        if getattr(layer, field.name) is None:  # no bias
            continue
        offset = 0
        for place, (source, outputs) in enumerate(zip(layer.sources, layer.outputs, strict=True)):
            for number in range(layer.experts.start, layer.experts.stop) if "{}" in source.path else (None,):
                shape, ranges, starts = [], [], []
                index = () if number is None else (number - layer.experts.start,)
                axes = field.axes if number is None else field.axes.removeprefix("e")
                if axes.startswith("s"):
                    axes, index = axes.removeprefix("s"), (*index, place)
                for axis in axes:
                    shard = outputs if axis == "o" else axis_of(layer, axis)
                    first, at = (source.start, offset) if axis == "o" else (0, 0)
                    size = source.size if axis == "o" and source.size else shard.size
                    ratio = field.ratio(axis)
                    shape.append(ratio.span(0, size, size)[1])
                    ranges.append(ratio.span(first + shard.start, first + shard.stop, size))
                    starts.append(at)
                name = f"{source.path}.{field.name}".replace("{}", str(number))
                yield Slice(name, tuple(shape), tuple(ranges), layer, field.name, tuple(starts), index)
            offset += stored_width(field, "o", outputs, source)
