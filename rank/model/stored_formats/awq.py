"""AWQ (Lin et al. 2023, arXiv 2306.00978), as AutoAWQ's GEMM version stores it.

Of a linear of I inputs and O outputs: qweight int32 [I, O / 8] and qzeros int32 [groups, O / 8], eight neighbouring
outputs in each, from the lowest four bits on in the order of ORDER; scales [groups, O].
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....kernels.quantized import packing_cpu
from ..shard import Shard
from ..weights.slicing import Field, Ratio
from . import is_stored
from ._part import GroupedFormat, GroupedPart, Grouping, check_settings, group_size, unpack

ORDER = 0, 2, 4, 6, 1, 3, 5, 7
HARMLESS: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scheme(GroupedFormat):
    def fields(self, inputs: Shard) -> Sequence[Field]:
        packed, grouped = Ratio(1, 8), Ratio(1, self.grouping.group, shared=True)
        return (
            Field("qweight", "io", torch.int32, ratios={"o": packed}, made_up=self.grouping.codes),
            Field("qzeros", "io", torch.int32, ratios={"i": grouped, "o": packed}, made_up=self.grouping.zeros()),
            Field("scales", "io", torch.float32, ratios={"i": grouped}, made_up=self.grouping.scales),
        )

    def decode(self, part: GroupedPart) -> tuple[Tensor, Tensor, Tensor]:
        zeros = part.spread(_in_order(part.read("qzeros")).t()).to(torch.int16)
        qweight = part.read("qweight")
        codes = packing_cpu.unpack_words(qweight, "outputs") if packing_cpu.takes(qweight) else _in_order(qweight).t()
        return codes, part.spread(part.read("scales").t()), zeros


def _in_order(packed: Tensor) -> Tensor:
    """int32 [N, O / 8] → uint8 [N, O]."""
    codes = unpack(packed, 4).unflatten(1, (-1, 8))
    return torch.stack([codes[..., ORDER.index(output)] for output in range(8)], -1).flatten(1)


def match(settings: dict[str, Any], path: str, names: Collection[str]) -> Scheme | None:
    settings = {"bits": settings.get("w_bit")} | settings
    check_settings(settings, bits=(4,), version=(None, "gemm", "GEMM"), zero_point=(None, True))
    if not is_stored(path, "qweight", names):
        return None
    return Scheme(Grouping(4, group_size(settings, "group_size", "q_group_size"), False))
