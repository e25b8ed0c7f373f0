"""Unquantised weights: of the model's dtype, or left in the checkpoint's 16 bits where a CPU computes in f32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....kernels.embedding.embedding import embedding
from ....kernels.quantized.linear import Halves
from ..shard import Shard
from ..weights.slicing import Field, Source
from ._format import Format
from ._packed import PackedPart
from ._part import Part
from ._stacks import Stacked, StoredStack


@dataclass(frozen=True)
class Dense(Format):
    """Plain matrices of the model's dtype."""

    reads_plain = True

    def part(self, inputs: Shard, outputs: Sequence[Shard], bias: bool, sources: Sequence[Source]) -> Part:
        return Part(inputs, outputs, bias, sources)

    def stack(self, layer: Stacked, sources: Sequence[Source]) -> None:
        return None


DENSE = Dense()


@dataclass(frozen=True)
class HalfFloats(Format):
    """Weights that stay bf16 or f16, as the checkpoint has them, where a CPU computes in f32: 16 bits a weight."""

    dtype: torch.dtype

    reads_plain = True

    def part(self, inputs: Shard, outputs: Sequence[Shard], bias: bool, sources: Sequence[Source]) -> Part:
        return HalfFloatsPart(self.dtype, inputs, outputs, bias, sources)

    def stack(self, layer: Stacked, sources: Sequence[Source]) -> StoredStack:
        return HalfFloatsStack(self.dtype, layer)

    @property
    def plain(self) -> Format:
        return DENSE


class HalfFloatsPart(PackedPart):
    """Some outputs of a linear, or an embedding table."""

    fields = (Field("weight", "oi", stored=True), Field("bias", "o"))
    looks_up = True

    def __init__(
        self, dtype: torch.dtype, inputs: Shard, outputs: Sequence[Shard], bias: bool, sources: Sequence[Source]
    ):
        super().__init__(inputs, outputs, bias, sources)
        self.dtype = dtype

    @property
    def shared(self) -> bool:
        return not self.sources

    def kept_bits(self, device: torch.device) -> float:
        return 8 * self.dtype.itemsize

    def finish(self) -> None:
        self.hold(Halves(self.weight))
        del self.weight

    def rows(self, ids: Tensor, start: int, scale: float, dtype: torch.dtype) -> Tensor:
        return embedding(ids, self.packed.weight, start, False, scale, dtype)


class HalfFloatsStack(StoredStack):
    """Experts that stay bf16 or f16, as the checkpoint has them, where a CPU computes in f32."""

    def __init__(self, dtype: torch.dtype, layer: Stacked):
        self.dtype = dtype
        self.fields = (Field("weight", layer.layout.axes, stored=True),)

    def make(self, layer: Stacked) -> Tensor:
        weight = layer.get_parameter("weight").data
        return layer.in_order(weight if layer.layout.axes == "eoi" else weight.mT)

    def kept_bits(self, layer: Stacked, device: torch.device) -> float:
        return 8 * self.dtype.itemsize
