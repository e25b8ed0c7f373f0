"""GPTQ (Frantar et al. 2022, arXiv 2210.17323), as AutoGPTQ and GPTQModel store it.

Of a linear of I inputs and O outputs: qweight int32 [I * bits / 32, O], codes along the inputs; qzeros int32
[groups, O * bits / 32], zero points along the outputs, one less than they are unless checkpoint_format is gptq_v2;
scales [groups, O]. Lower bits come first. With desc_act, g_idx int32 [I] says which group each input is of.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ....errors import MODEL, FatalError
from ....kernels.quantized import affine, int4_cuda
from ..shard import Shard
from ..weights.slicing import Field, Ratio, Source, Turns
from . import is_stored
from ._part import GroupedPart, Grouping, check_settings, group_size, unpack

PIECE = int4_cuda.INPUTS  # of codes of 4 bits
HARMLESS = ".g_idx", ".bias"  # the order of the inputs, and zeros where the model has no biases


@dataclass(frozen=True)
class Scheme:
    grouping: Grouping
    offset: int  # of the zero points above what is stored
    ordered: bool  # by g_idx

    stack_unit = affine.UNIT

    def __call__(self, inputs: Shard, outputs: Sequence[Shard], bias: bool, sources: Sequence[Source]) -> Part:
        return (OrderedPart if self.ordered else Part)(self, inputs, outputs, bias, sources)


class Part(GroupedPart):
    qweight: Tensor
    qzeros: Tensor
    scales: Tensor

    def __init__(self, scheme: Scheme, inputs: Shard, outputs: Sequence[Shard], bias: bool, sources: Sequence[Source]):
        bits, group, _ = scheme.grouping
        packed, grouped = Ratio(1, 32 // bits), Ratio(1, group, True, everywhere=scheme.ordered)
        zeros = scheme.grouping.zeros(scheme.offset)
        fields = [
            Field("qweight", "io", torch.int32, ratios={"i": packed}, made_up=scheme.grouping.codes),
            Field("qzeros", "io", torch.int32, ratios={"i": grouped, "o": packed}, made_up=zeros),
            Field("scales", "io", torch.float32, ratios={"i": grouped}, made_up=scheme.grouping.scales),
        ]
        if scheme.ordered:
            fields.append(Field("g_idx", "si", torch.int32, made_up=Turns(-(-inputs.size // group))))
        super().__init__(fields, scheme.grouping, inputs, outputs, bias, sources)
        self.scheme = scheme

    def unpacked(self) -> tuple[Tensor, Tensor, Tensor]:
        """codes uint8 [O, I], and of the stored groups scales f32 and zeros int16 [O, groups]."""
        bits = self.grouping.bits
        zeros = unpack(self.qzeros, bits).to(torch.int16) + self.scheme.offset
        return unpack(self.qweight.t(), bits), self.scales.t(), zeros.t()

    def decode(self) -> tuple[Tensor, Tensor, Tensor]:
        codes, scales, zeros = self.unpacked()
        return codes, self.spread(scales), self.spread(zeros)


class OrderedPart(Part):
    """Of desc_act: inputs of one group lie anywhere. They are brought together, in x as in the weight, and each group
    is filled up to a multiple of what kernels take, as those that a rank has of it may be any number. So are all
    inputs, as codes of 4 bits lie in pieces."""

    g_idx: Tensor  # [sources, I]
    order: Tensor  # [I'] which input each is; this rank's number of inputs where it fills up

    def decode(self) -> tuple[Tensor, Tensor, Tensor]:
        codes, scales, zeros = self.unpacked()
        groups = scales.shape[1]
        g_idx = self._groups(groups)
        counts = torch.bincount(g_idx, minlength=groups)
        units = -(-counts // affine.UNIT)  # of each group
        units[-1:] += -units.sum() % (PIECE // affine.UNIT)
        starts = units.cumsum(0) - units
        place = torch.arange(len(g_idx), device=codes.device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        place += (starts * affine.UNIT).repeat_interleave(counts)
        self.order = place.new_full((int(units.sum()) * affine.UNIT,), len(g_idx))
        self.order[place] = g_idx.argsort(stable=True)
        together = math.gcd(*units.tolist()) or 1  # of a group's units, a scale serves so many
        of = torch.arange(groups, device=codes.device).repeat_interleave(units // together)
        return pad(codes, (0, 1)).index_select(1, self.order), scales[:, of], zeros[:, of]

    def kept_bits(self, device: torch.device) -> float:
        """As far as the sizes tell: where a rank has a part of the inputs, g_idx says how many of each group it has."""
        bits, group, symmetric = self.grouping
        width, size = self.inputs.width, self.inputs.size
        if not width:
            return 0
        filled = width if width == size else filled_inputs(group, width / size) * size / group
        kept = -(-round(filled) // PIECE) * PIECE
        unit = self.unit if kept == width == size else affine.UNIT
        of_order = 8 * torch.int64.itemsize / max(self.width, 1)
        return (affine.kept_bits(bits, unit, kept, symmetric, device) + of_order) * kept / width

    def _groups(self, count: int) -> Tensor:
        """Which of so many groups each input is of, [I]."""
        g_idx = self.g_idx[0]
        for source, other in zip(self.sources[1:], self.g_idx[1:], strict=True):
            if not torch.equal(other, g_idx):
                raise FatalError(
                    f"{source.path}.g_idx and {self.sources[0].path}.g_idx put inputs into other groups, and both "
                    "linears are multiplied as one: quantise them together, or without desc_act",
                    MODEL,
                )
        if g_idx.numel() and not 0 <= int(g_idx.min()) <= int(g_idx.max()) < count:
            raise FatalError(f"{self.sources[0].path}.g_idx has numbers of groups outside 0 to {count - 1}", MODEL)
        return g_idx

    def plain(self) -> Tensor:
        """The weight [O, I] in f32, its inputs where they were."""
        codes, scales, zeros = self.unpacked()
        at = self._groups(scales.shape[1]).long()
        return (codes - zeros[:, at]) * scales.float()[:, at]

    def finish(self) -> None:
        super().finish()
        self.filled = bool((self.order == self.inputs.width).any())
        order = self.order
        del self.order
        self.register_buffer("order", order, persistent=False)

    def together(self, x: Tensor) -> Tensor:
        """x [T, I] in the order of the groups, [T, I']."""
        return (pad(x, (0, 1)) if self.filled else x).index_select(1, self.order)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.together(x))

    def gated(self, x: Tensor, activation: str) -> Tensor:
        return super().gated(self.together(x), activation)


@functools.cache
def filled_inputs(group: int, share: float) -> float:
    """How many inputs of a group, filled up to what kernels take, a rank has on average that has this share of all, as
    they fall to it."""
    found = 0.0
    for count in range(1, group + 1):
        likely = math.comb(group, count) * share**count * (1 - share) ** (group - count)
        found += likely * -(-count // affine.UNIT) * affine.UNIT
    return found


def match(settings: dict[str, Any], path: str, names: Collection[str]) -> Scheme | None:
    check_settings(settings, bits=(4, 8), checkpoint_format=(None, "gptq", "gptq_v2"), desc_act=(None, False, True))
    if not is_stored(path, "qweight", names):
        return None
    grouping = Grouping(settings["bits"], group_size(settings, "group_size"), settings.get("sym") is not False)
    offset = int(settings.get("checkpoint_format") != "gptq_v2")
    return Scheme(grouping, offset, bool(grouping.group and settings.get("desc_act")))
