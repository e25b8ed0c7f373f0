"""Marlin (Frantar et al. 2024, arXiv 2408.11743), as AutoGPTQ and GPTQModel store it: GPTQ's symmetric codes of 4 bits
in the order in which that kernel's threads read them.

Of a linear of I inputs and O outputs: B int32 [I / 16, 2 O], s [groups, O], and a workspace that is unused. 64
outputs of 16 inputs are four tiles and lie together: 32 threads have eight codes of each. What the order is for: the
fragments of `mma.m16n8k16`, in the PTX manual.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..shard import Shard
from ..weights.slicing import Field, Ratio
from . import is_stored
from ._part import GroupedFormat, GroupedPart, Grouping, check_settings, group_size, unpack

ORDER = 0, 2, 4, 6, 1, 3, 5, 7  # of a thread's eight codes, from the lowest bits on
MIDDLE = 8  # the zero point of all codes
TOGETHER = 64  # outputs
HARMLESS = ".workspace", ".g_idx", ".bias"


@dataclass(frozen=True)
class Scheme(GroupedFormat):
    cut_unit = TOGETHER  # so that a cut of an expert's inner size leaves both its linears' tiles whole

    def fields(self, inputs: Shard) -> Sequence[Field]:
        grouped, together = Ratio(1, self.grouping.group, shared=True), Ratio(TOGETHER, TOGETHER)
        tiles = {"i": Ratio(1, 16), "o": Ratio(2 * TOGETHER, TOGETHER)}
        return (
            Field("B", "io", torch.int32, ratios=tiles, made_up=self.grouping.codes),
            Field("s", "io", torch.float32, ratios={"i": grouped, "o": together}, made_up=self.grouping.scales),
        )

    def decode(self, part: GroupedPart) -> tuple[Tensor, Tensor, Tensor]:
        whole = self.grouping.group in (0, part.inputs.size)
        scales = part.spread(scales_in_order(part.read("s"), whole).t())
        return codes_in_order(part.read("B")).t(), scales, torch.full_like(scales, MIDDLE, dtype=torch.int16)


def codes_in_order(packed: Tensor) -> Tensor:
    """int32 [I / 16, 2 O] → uint8 [I, O]."""
    codes = unpack(packed, 4).view(-1, 8)[:, [ORDER.index(one) for one in range(8)]]
    # Axes of four tiles: a thread's column and row, the tile, and of its codes which eight columns, which eight rows,
    # and which of two neighbouring rows.
    tiles = codes.view(-1, 8, 4, 4, 2, 2, 2).permute(0, 3, 5, 2, 6, 4, 1)
    return tiles.reshape(len(packed), -1, 16, 16).transpose(1, 2).flatten(0, 1).flatten(1)


def scales_in_order(scales: Tensor, whole: bool) -> Tensor:
    """[groups, O] → [groups, O], or the reverse. whole: all inputs are one group, which has an order of its own."""
    shape = (-1, 4, 4, 2) if whole else (-1, 8, 8)
    return scales.reshape(shape).transpose(1, 2).reshape(scales.shape)


def match(settings: dict[str, Any], path: str, names: Collection[str]) -> Scheme | None:
    settings = {"bits": 4} | settings
    check_settings(settings, bits=(4,), sym=(None, True), desc_act=(None, False))
    return Scheme(Grouping(4, group_size(settings, "group_size"), True)) if is_stored(path, "B", names) else None
