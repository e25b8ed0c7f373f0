"""How experts are stored: in a format of linears, each expert as one of its parts, and all packed as one stack."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ....kernels.moe.moe import Matrices
from ....kernels.quantized import cuda_layouts
from ....kernels.quantized.stack import padded, split_for_host
from ....kernels.quantized.super_blocks import SuperBlocks
from ..shard import Shard
from ..weights.slicing import Field, Source
from ._packed import PackedPart
from ._part import Part

AT_ONCE = 1 << 23  # elements of experts that are packed at once: of few, launches would take most of the time


class ExpertLayout(NamedTuple):
    """How checkpoints hold experts that are stacked in one tensor."""

    axes: str = "eoi"  # of the weights; "eio": inputs before outputs
    interleaved: bool = False  # gate and up in turn; else gate over up
    biased: bool = False


APART = ExpertLayout()  # or each in tensors of its own


class Stacked(Protocol):
    """One linear of all experts, whose weights are quantised."""

    experts: Shard
    inputs: Shard
    outputs: tuple[Shard, ...]
    layout: ExpertLayout
    model_dtype: torch.dtype
    in_host: bool
    fixed: int
    of_fixed: Matrices | None
    sources: tuple[Source, ...]
    fields: tuple[Field, ...]

    @property
    def width(self) -> int: ...

    @property
    def other_inputs(self) -> int: ...

    def in_order(self, x: Tensor) -> Tensor: ...

    def get_parameter(self, target: str) -> nn.Parameter: ...


class StoredStack(ABC):
    """How the quantised weights of a stack of experts are stored."""

    fields: tuple[Field, ...]  # the tensors, without biases
    packs_for_host = False  # whether a GPU packs what CPUs read

    @abstractmethod
    def make(self, layer: Stacked) -> Matrices:
        """Pack the layer's parameters [experts, outputs, inputs], gate over up where it has both."""

    @abstractmethod
    def kept_bits(self, layer: Stacked, device: torch.device) -> float:
        """Bits of a weight as `make` keeps it there, with its share of its group's scale; 0: it makes plain weights."""

    def slot_bits(self, layer: Stacked, device: torch.device) -> float:
        """Bits of a weight on a GPU where experts lie in host memory as well; 0: the same as `kept_bits`."""
        return 0

    def becomes_plain(self, layer: Stacked, device: torch.device) -> bool:
        """Whether experts in host memory become plain weights, as the device has no form for what CPUs keep."""
        return False


class StackOfParts(StoredStack):
    """A stack in a format of linears. What makes a linear's part makes each expert's, from its slices of the stack."""

    packs_for_host = True

    def __init__(
        self,
        make_part: Callable[[Shard, Sequence[Shard], bool, Sequence[Source]], Part],
        layer: Stacked,
        sources: Sequence[Source],
    ):
        """make_part: `Format.part`. Raises FatalError where tensor parallelism parts what is stored as one."""
        named = [one._replace(path=one.path.replace("{}", "0")) for one in sources]
        part = make_part(layer.inputs, layer.outputs, False, named)
        assert isinstance(part, PackedPart)
        self.part = part
        weights = [field for field in part.fields if field.name != "bias"]
        axes = {field.name: f"e{field.axes}" for field in weights}
        if weights[0].stored:  # read as a plain checkpoint has it
            axes["weight"] = layer.layout.axes
        self.transposed = weights[0].stored and layer.layout.axes == "eio"
        self.fields = tuple(field._replace(axes=axes[field.name]) for field in weights)

    def take(self, layer: Stacked, first: int, count: int = 1) -> None:
        """Let the part be this expert's, or of several, whose outputs follow each other."""
        for field in self.fields:
            some = layer.get_parameter(field.name).data[first : first + count]
            some = some.mT.contiguous() if self.transposed else some
            one = some[0] if count == 1 else some.flatten(0, 1)
            setattr(self.part, field.name, nn.Parameter(one, requires_grad=False))

    def drop(self) -> None:
        for field in self.fields:
            delattr(self.part, field.name)

    def make(self, layer: Stacked) -> Matrices:
        shape = experts, outputs, inputs = layer.experts.width, layer.width, layer.inputs.width
        at_once = max(1, AT_ONCE // max(1, outputs * inputs))

        def encoded(index: int) -> list[Tensor]:
            first = index * at_once
            count = min(at_once, experts - first)
            made = self.encoded(layer, first, count)
            return [layer.in_order(x.unflatten(0, (count, -1))).flatten(0, 1) for x in made]

        of_fixed, made = split_for_host(self.part.codec, encoded, shape, at_once, layer.in_host, layer.fixed)
        layer.of_fixed = of_fixed if layer.fixed else None
        self.drop()
        return made

    def encoded(self, layer: Stacked, first: int, count: int) -> Sequence[Tensor]:
        """The codec's inputs for so many experts, [count * outputs, ...] each."""
        if self.part.rows_apart:
            self.take(layer, first, count)
            return self.part.encoded()
        each = []
        for expert in range(first, first + count):
            self.take(layer, expert)
            each.append(self.part.encoded())
        return [torch.cat(some) for some in zip(*each, strict=True)]

    def kept_bits(self, layer: Stacked, device: torch.device) -> float:
        return self.part.kept_bits(device) * padded(layer.width) / max(layer.width, 1)

    def slot_bits(self, layer: Stacked, device: torch.device) -> float:
        """Bits on a GPU where experts lie in host memory as well: super-blocks have its own form there."""
        here = self.kept_bits(layer, device)
        if isinstance(self.part.codec, SuperBlocks):
            return here
        return max(here, self.kept_bits(layer, torch.device("cpu")))

    def becomes_plain(self, layer: Stacked, device: torch.device) -> bool:
        codec = self.part.codec
        if device.type != "cuda" or not isinstance(codec, SuperBlocks):
            return False
        return not cuda_layouts.takes_super_blocks(layer.inputs.width, codec.type.form)
