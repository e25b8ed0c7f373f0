"""Weights that stay bf16 or f16, as the checkpoint has them, where a CPU computes in f32: 16 bits a weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ....kernels.quantized import half_floats
from ..shard import Shard
from ..weights.slicing import Field, Source
from ._packed import PackedPart
from .dense import Part as Plain


class Part(PackedPart):
    """Some outputs of a linear. A tied head has the embedding's table, which then stays so, too."""

    fields = (Field("weight", "oi", stored=True), Field("bias", "o"))
    codec = half_floats

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
        self.hold(self.codec.pack(self.weight))
        del self.weight


@dataclass(frozen=True)
class MakeHalfFloats:
    """What makes parts that stay as the checkpoint has them. plain: what makes them where others read the matrix.
    read_plain: whether the checkpoint's tensors can be read as plain ones."""

    dtype: torch.dtype
    plain = Plain
    read_plain = True

    def __call__(self, inputs: Shard, outputs: Sequence[Shard], bias: bool, sources: Sequence[Source]) -> Plain:
        return Part(self.dtype, inputs, outputs, bias, sources)
