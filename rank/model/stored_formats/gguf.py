"""ggml's formats, as GGUF files hold them: blocks of bytes, one for each group of inputs.

quantization_config, which rank/gguf makes of the file's header, has the type of each quantised matrix by its name.
Types without kernels are dequantised while they are loaded.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....kernels.cpp import ops
from ....kernels.moe.moe import Matrices
from ....kernels.quantized import blocks_cpu, ggml_types, mxfp4
from ....kernels.quantized.ggml import CODECS, Ggml
from ....kernels.quantized.ggml_types import TYPES
from ...gguf.types import BY_NAME
from ..formats._format import Format
from ..formats._part import Part
from ..formats._stacks import Stacked, StoredStack
from ..shard import Shard
from ..weights.slicing import Field, Pattern, Ratio, Source
from . import mxfp4 as stored_mxfp4
from ._part import StoredPart

HARMLESS: tuple[str, ...] = ()


def made_up(type: str, inputs: int) -> Pattern:
    """Random weights of a deviation of 1 / sqrt(inputs)."""
    by = (max(inputs, 1) ** -0.5 * factor for factor in random_factors(type))
    scales = [struct.pack("<e", factor) for factor in by]
    places = zip(TYPES[type.lower()].factors_at, scales, strict=True)
    return Pattern(BY_NAME[type].bytes, {at + i: scale[i] for at, scale in places for i in range(2)})


@functools.cache
def random_factors(type: str) -> tuple[float, ...]:
    """The factors with which random blocks mean weights of a deviation of 1; with minima, of a mean of 0."""
    of = TYPES[type.lower()]
    blocks = (1 << 16) // of.form.super
    bytes = torch.randint(0, 256, (1, blocks, of.bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    def weights(*factors: float) -> Tensor:
        each = torch.tensor(factors, dtype=torch.float16).expand(1, blocks, -1)
        decoded = of.decode(of.join(of.split(bytes)._replace(factors=each)))
        return ggml_types.weights(decoded, of.form)

    factors = [1.0]
    if len(of.factors_at) > 1:
        factors.append(-weights(1, 0).mean().item() / weights(0, 1).mean().item())
    deviation = weights(*factors).std().item()
    return tuple(factor / deviation for factor in factors)


class Blocks(StoredPart):
    """Some outputs of a linear, which are cut between groups and never encoded again."""

    blocks: Tensor  # uint8 [O, bytes]
    codec: Ggml
    rows_apart = True
    looks_up = True

    @property
    def borrows(self) -> bool:  # type: ignore[override]  # of compiled kernels all pack into memory of their own
        return ops.available()

    def __init__(self, type: str, inputs: Shard, outputs: Sequence[Shard], bias: bool, sources: Sequence[Source]):
        ratios = {"i": Ratio(BY_NAME[type].bytes, BY_NAME[type].group)}
        random = made_up(type, inputs.size)
        fields = (Field("blocks", "oi", torch.uint8, ratios=ratios, made_up=random),)
        super().__init__(fields, inputs, outputs, bias, sources)
        self.codec = CODECS[type]

    def encoded(self) -> Sequence[Tensor]:
        return (self.blocks.data,)

    def kept_bits(self, device: torch.device) -> float:
        return self.codec.kept_bits(self.inputs.width, device)

    def rows(self, ids: Tensor, start: int, scale: float, dtype: torch.dtype) -> Tensor:
        # C++ does this, as embeddings are left in this format only then.
        return blocks_cpu.rows(ids, self.packed, start, scale, dtype)


@dataclass(frozen=True)
class Scheme(Format):
    """Weights of one type."""

    type: str

    reads_plain = True  # a file's tensors can be read dequantised as well

    @property
    def cut_unit(self) -> int:  # type: ignore[override]  # a constant of other formats
        return BY_NAME[self.type].group

    def part(self, inputs: Shard, outputs: Sequence[Shard], bias: bool, sources: Sequence[Source]) -> Part:
        group = BY_NAME[self.type].group
        if inputs.start % group or inputs.width % group:  # a rank's part is dequantised where it would cut groups
            return Part(inputs, outputs, bias, sources)
        return Blocks(self.type, inputs, outputs, bias, sources)


@dataclass(frozen=True)
class Mxfp4Experts(Scheme):
    """Experts in MXFP4, which stay packed; no linear does."""

    type: str = "MXFP4"

    def fitting(self, path: str, size: int, ranks: int) -> Format:
        return self

    def stack(self, layer: Stacked, sources: Sequence[Source]) -> StoredStack:
        return Mxfp4Stack()


class Mxfp4Stack(stored_mxfp4.ExpertStack):
    """All experts of a layer. A block has its scale, e8m0, and behind it the codes of 32 inputs: in each of 16 bytes an
    input of the first half in the lower bits, and one of the second."""

    def __init__(self) -> None:
        size = BY_NAME["MXFP4"]
        ratios = {"i": Ratio(size.bytes, size.group)}
        self.fields = (Field("blocks", "eoi", torch.uint8, ratios=ratios, made_up=Pattern(size.bytes, {0: 121})),)

    def make(self, layer: Stacked) -> Matrices:
        blocks = layer.in_order(layer.get_parameter("blocks").data)
        blocks = blocks.unflatten(-1, (-1, BY_NAME["MXFP4"].bytes))
        scales, codes = blocks[..., 0], blocks[..., 1:]
        each = torch.cat((codes & 15, codes >> 4), -1)  # [..., groups, 32], in order
        codes = (each[..., ::2] | each[..., 1::2] << 4).flatten(-2)
        return mxfp4.experts(codes, scales, layer.other_inputs, layer.model_dtype)


def match(settings: dict[str, Any], path: str, names: Collection[str]) -> Scheme | None:
    type = settings["types"].get(path, "")
    if type == "MXFP4" and path.rpartition(".")[0].endswith(".experts"):
        return Mxfp4Experts()
    return Scheme(type) if type in CODECS else None
