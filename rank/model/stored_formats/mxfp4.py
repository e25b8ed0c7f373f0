"""MXFP4 (OCP Microscaling Formats v1.0): e2m1 with a scale e8m0 for each 32 inputs, as gpt-oss and DeepSeek-V4 store
their experts.

Of E experts of I inputs and O outputs, gpt-oss: blocks uint8 [E, O, I / 32, 16], two neighbouring inputs in each, the
first in the lower bits; scales uint8 [E, O, I / 32]. DeepSeek-V4, each expert in tensors of its own: weight int8
[O, I / 2]; scale e8m0 [O, I / 32].
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....kernels.moe.moe import Matrices
from ....kernels.quantized import mxfp4
from ..formats._format import Format
from ..formats._part import Part
from ..formats._stacks import Stacked, StoredStack
from ..shard import Shard
from ..weights.slicing import Field, Ratio, Source

GROUP = 32
HARMLESS: tuple[str, ...] = ()


STACKED = (
    Field("blocks", "eoib", torch.uint8, ratios={"i": Ratio(1, GROUP), "b": Ratio(GROUP // 2)}),
    Field("scales", "eoi", torch.uint8, ratios={"i": Ratio(1, GROUP)}, made_up=121),
)
APART = (
    Field("weight", "eoi", torch.int8, ratios={"i": Ratio(1, 2)}),
    Field("scale", "eoi", torch.float8_e8m0fnu, ratios={"i": Ratio(1, GROUP)}, made_up=2**-6),
)


@dataclass(frozen=True)
class Scheme(Format):
    """Experts alone: no linear is stored so."""

    apart: bool = False  # each expert has tensors of its own

    def part(self, inputs: Shard, outputs: Sequence[Shard], bias: bool, sources: Sequence[Source]) -> Part:
        raise AssertionError("experts alone are stored in MXFP4")

    def stack(self, layer: Stacked, sources: Sequence[Source]) -> StoredStack:
        return ExpertStack(APART if self.apart else STACKED)


class ExpertStack(StoredStack):
    """All experts of a layer, which stay packed."""

    def __init__(self, fields: tuple[Field, ...]):
        self.fields = fields

    def kept_bits(self, layer: Stacked, device: torch.device) -> float:
        return mxfp4.kept_bits(layer.width, layer.inputs.width, layer.other_inputs, device)

    def becomes_plain(self, layer: Stacked, device: torch.device) -> bool:
        return not self.kept_bits(layer, device)

    def make(self, layer: Stacked) -> Matrices:
        codes, scales = (layer.get_parameter(field.name).data.view(torch.uint8) for field in self.fields)
        codes = codes.flatten(2)
        return mxfp4.experts(codes, scales, layer.other_inputs, layer.model_dtype, layer.in_order)


def match(settings: dict[str, Any], path: str, names: Collection[str]) -> Scheme | None:
    stacked = path.rpartition(".")[0].endswith(".experts")
    return Scheme() if stacked and (not names or f"{path}.blocks" in names) else None
