"""Which piece of which checkpoint tensor goes where: one description for every kind of layer and weight format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from ....kernels.linear import pack
from ..layers.shard import Span


class Field(NamedTuple):
    """One tensor of a layer as checkpoints store it."""

    name: str
    axes: str  # one letter per axis: "o" runs along the layer's outputs, "i" along its inputs


class Sliced(nn.Module):
    """A layer with weights, cut for this rank. Several outputs are parts that checkpoints hold as separate tensors.

    Parameters are made on the meta device; loading gives them their device and dtype.
    """

    fields: tuple[Field, ...]
    outputs: tuple[Span, ...]
    inputs: Span

    def finish(self) -> None:
        """Called once when all layers are loaded: bring the weights into the form that the device computes with."""


def pack_weight(layer: Sliced) -> None:
    """Replace `weight` by its packed form, if it has one on this device. A tied layer's own `weight` stays."""
    plain = layer.get_parameter("weight")
    packed = pack(plain)
    if packed is not plain:
        del layer.weight
        layer.register_buffer("weight", packed, persistent=False)


@dataclass(frozen=True, slots=True)
class Slice:
    """`tensor[ranges]` of a checkpoint fills `target`, of the same shape."""

    tensor: str
    shape: tuple[int, ...]  # of the whole tensor
    ranges: tuple[tuple[int, int], ...]
    target: Tensor


def slices(layer: Sliced, paths: Sequence[str]) -> Iterator[Slice]:
    """All that fills one layer's parameters. `paths` are the checkpoint's names of its parts, one per output span."""
    for field in layer.fields:
        parameter = getattr(layer, field.name)
        if parameter is None:  # no bias
            continue
        offset = 0
        for path, outputs in zip(paths, layer.outputs, strict=True):
            spans = [outputs if axis == "o" else layer.inputs for axis in field.axes]
            offsets = [offset if axis == "o" else 0 for axis in field.axes]
            target = parameter.data
            for axis, (span, at) in enumerate(zip(spans, offsets, strict=True)):
                target = target.narrow(axis, at, span.stop - span.start)
            ranges = tuple((span.start, span.stop) for span in spans)
            yield Slice(f"{path}.{field.name}", tuple(span.size for span in spans), ranges, target)
            offset += outputs.width
