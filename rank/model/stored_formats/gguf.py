"""ggml's formats, as GGUF files hold them: blocks of bytes, one for each group of inputs.

quantization_config, which rank/gguf makes of the file's header, has the type of each quantised matrix by its name.
Types without kernels are dequantised while they are loaded.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from ....kernels import quantized
from ....kernels.moe.moe import Matrices
from ....kernels.quantized import mxfp4
from ...gguf.types import BY_NAME
from ..experts.fused import StackedLinear
from ..formats._packed import Codec
from ..formats.dense import Part
from ..shard import Shard
from ..weights.slicing import Field, Pattern, Ratio, Source
from ._part import StoredPart

HARMLESS: tuple[str, ...] = ()
# Of random bytes with a scale of 1 weights have this deviation. Where in a block the scale is, and minima of f16, as
# multiples of it that bring the mean to zero.
RANDOM: dict[str, tuple[float, dict[int, float]]] = {
    "Q4_0": (4.6, {0: 1.0}), "Q4_1": (4.6, {0: 1.0, 2: -7.5}), "Q5_0": (9.2, {0: 1.0}),
    "Q5_1": (9.2, {0: 1.0, 2: -15.5}), "Q8_0": (74, {0: 1.0}), "Q2_K": (13.9, {80: 1.0, 82: 1.5}),
    "Q3_K": (43, {108: 1.0}), "Q4_K": (258, {0: 1.0, 2: 7.5}), "Q5_K": (527, {0: 1.0, 2: 15.5}),
    "Q6_K": (1361, {208: 1.0}), "IQ4_NL": (67, {0: 1.0}), "IQ4_XS": (1248, {0: 1.0}),
}  # fmt: skip


def made_up(type: str, inputs: int) -> Pattern:
    """Random weights of a deviation of 1 / sqrt(inputs)."""
    deviation, places = RANDOM[type]
    found: dict[int, int] = {}
    for place, factor in places.items():
        scale = struct.pack("<e", factor / deviation / max(inputs, 1) ** 0.5)
        found |= {place: scale[0], place + 1: scale[1]}
    return Pattern(BY_NAME[type].bytes, found)


class Stored(Codec, Protocol):
    """A codec whose weights GGUF files may hold."""

    @property
    def from_blocks(self) -> Callable[[Tensor], tuple[Tensor, ...]]:
        """uint8 [outputs, bytes], as GGUF files hold a weight → what `pack` takes."""

    @property
    def kept_bits(self) -> Callable[[int, torch.device], float]:
        """(inputs, device): of a weight as `pack` keeps it there, with its share of the rest."""


class Blocks(StoredPart):
    """Some outputs of a linear, which are cut between groups and never encoded again."""

    blocks: Tensor  # uint8 [O, bytes]
    codec: Stored
    rows_apart = True

    def __init__(
        self, codec: Stored, type: str, inputs: Shard, outputs: Sequence[Shard], bias: bool, sources: Sequence[Source]
    ):
        ratios = {"i": Ratio(BY_NAME[type].bytes, BY_NAME[type].group)}
        random = made_up(type, inputs.size)
        fields = (Field("blocks", "oi", torch.uint8, ratios=ratios, made_up=random),)
        super().__init__(fields, inputs, outputs, bias, sources)
        self.codec = codec

    def encoded(self) -> Sequence[Tensor]:
        return self.codec.from_blocks(self.blocks.data)

    def kept_bits(self, device: torch.device) -> float:
        return self.codec.kept_bits(self.inputs.width, device)


class Scheme(NamedTuple):
    """What makes parts of one type."""

    type: str

    @property
    def stack_unit(self) -> int:
        """Neighbouring inputs of an expert that a cut leaves together."""
        return BY_NAME[self.type].group

    @property
    def read_plain(self) -> bool:
        """A file's tensors can be read dequantised as well."""
        return True

    def __call__(self, inputs: Shard, outputs: Sequence[Shard], bias: bool, sources: Sequence[Source]) -> Part:
        group = BY_NAME[self.type].group
        if inputs.start % group or inputs.width % group:  # a rank's part is dequantised where it would cut groups
            return Part(inputs, outputs, bias, sources)
        return Blocks(cast(Stored, _codec(self.type)), self.type, inputs, outputs, bias, sources)


@dataclass(frozen=True)
class Mxfp4Experts:
    """Of stacked experts alone, which stay packed. A block has its scale, e8m0, and behind it the codes of 32 inputs:
    in each of 16 bytes an input of the first half in the lower bits, and one of the second."""

    @property
    def fields(self) -> tuple[Field, ...]:
        size = BY_NAME["MXFP4"]
        ratios = {"i": Ratio(size.bytes, size.group)}
        return (Field("blocks", "eoi", torch.uint8, ratios=ratios, made_up=Pattern(size.bytes, {0: 121})),)

    @property
    def stack_unit(self) -> int:
        return BY_NAME["MXFP4"].group

    @property
    def read_plain(self) -> bool:
        return True

    def kept_bits(self, layer: StackedLinear, device: torch.device) -> float:
        return mxfp4.kept_bits(layer.width, layer.inputs.width, layer.other_inputs, device)

    def make(self, layer: StackedLinear) -> Matrices:
        blocks = layer.in_order(layer.get_parameter("blocks").data)
        blocks = blocks.unflatten(-1, (-1, BY_NAME["MXFP4"].bytes))
        scales, codes = blocks[..., 0], blocks[..., 1:]
        each = torch.cat((codes & 15, codes >> 4), -1)  # [..., groups, 32], in order
        codes = (each[..., ::2] | each[..., 1::2] << 4).flatten(-2)
        return mxfp4.experts(codes, scales, layer.other_inputs, layer.model_dtype)


def match(settings: dict[str, Any], path: str, names: Collection[str]) -> Scheme | Mxfp4Experts | None:
    type = settings["types"].get(path, "")
    if type == "MXFP4" and path.rpartition(".")[0].endswith(".experts"):
        return Mxfp4Experts()
    return Scheme(type) if type and hasattr(_codec(type), "linear") else None


@functools.cache
def _codec(type: str) -> ModuleType | None:
    """The file of kernels/quantized/ of this type."""
    known = {module.name for module in pkgutil.iter_modules(quantized.__path__)}
    return importlib.import_module(f"{quantized.__name__}.{type.lower()}") if type.lower() in known else None
