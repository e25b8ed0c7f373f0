"""GPTQ (Frantar et al. 2022, arXiv 2210.17323), as AutoGPTQ and GPTQModel store it.

Of a linear of I inputs and O outputs: qweight int32 [I * bits / 32, O], codes along the inputs; qzeros int32
[groups, O * bits / 32], zero points along the outputs, one less than they are unless checkpoint_format is gptq_v2;
scales [groups, O]. Lower bits come first. With desc_act, g_idx int32 [I] says which group each input is of.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..shard import Shard
from ..weights.slicing import Field, Ratio, Source
from . import is_stored
from ._part import GroupedPart, check_settings, unpack


@dataclass(frozen=True)
class Scheme:
    bits: int
    group: int  # 0: all inputs are one
    offset: int  # of the zero points above what is stored

    def __call__(self, inputs: Shard, outputs: Sequence[Shard], bias: bool, sources: Sequence[Source]) -> Part:
        return Part(self, inputs, outputs, bias, sources)


class Part(GroupedPart):
    def __init__(self, scheme: Scheme, inputs: Shard, outputs: Sequence[Shard], bias: bool, sources: Sequence[Source]):
        packed, grouped = Ratio(1, 32 // scheme.bits), Ratio(1, scheme.group, shared=True)
        fields = (
            Field("qweight", "io", torch.int32, ratios={"i": packed}),
            Field("qzeros", "io", torch.int32, ratios={"i": grouped, "o": packed}),
            Field("scales", "io", torch.float32, ratios={"i": grouped}, made_up=2.0**-9),
        )
        super().__init__(fields, scheme.group, inputs, outputs, bias, sources)
        self.scheme = scheme

    def decode(self) -> tuple[Tensor, Tensor, Tensor]:
        bits = self.scheme.bits
        zeros = unpack(self.qzeros, bits).to(torch.int16) + self.scheme.offset
        return unpack(self.qweight.t(), bits), self.spread(self.scales.t()), self.spread(zeros.t())


def match(settings: dict[str, Any], path: str, names: Collection[str]) -> Scheme | None:
    check_settings(settings, bits=(4, 8), checkpoint_format=(None, "gptq", "gptq_v2"), desc_act=(None, False))
    if not is_stored(path, "qweight", names):
        return None
    group = settings.get("group_size", 128)
    return Scheme(settings["bits"], max(group, 0), int(settings.get("checkpoint_format") != "gptq_v2"))
