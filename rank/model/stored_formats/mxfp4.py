"""MXFP4, as gpt-oss has its experts (OCP Microscaling Formats v1.0): e2m1 with a scale e8m0 for each 32 inputs.

Of E experts of I inputs and O outputs: blocks uint8 [E, O, I / 32, 16], two neighbouring inputs in each, the first in
the lower bits; scales uint8 [E, O, I / 32].
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from ....kernels.moe.moe import Matrices
from ....kernels.quantized import mxfp4
from ..experts.fused import StackedLinear
from ..weights.slicing import Field, Ratio

GROUP = 32
HARMLESS: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scheme:
    """Of experts alone: no linear is stored so."""

    fields = (
        Field("blocks", "eoib", torch.uint8, ratios={"i": Ratio(1, GROUP), "b": Ratio(GROUP // 2)}),
        Field("scales", "eoi", torch.uint8, ratios={"i": Ratio(1, GROUP)}, made_up=121),
    )

    def kept_bits(self, layer: StackedLinear, device: torch.device) -> float:
        return mxfp4.kept_bits(layer.width, layer.inputs.width, layer.other_inputs, device)

    def make(self, layer: StackedLinear) -> Matrices:
        codes, scales = layer.get_parameter("blocks").data.flatten(2), layer.get_parameter("scales").data
        return mxfp4.experts(codes, scales, layer.other_inputs, layer.model_dtype, layer.in_order)


def match(settings: dict[str, Any], path: str, names: Collection[str]) -> Scheme | None:
    stacked = path.rpartition(".")[0].endswith(".experts")
    return Scheme() if stacked and (not names or f"{path}.blocks" in names) else None
