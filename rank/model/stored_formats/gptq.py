"""GPTQ (Frantar et al. 2022, arXiv 2210.17323), as AutoGPTQ and GPTQModel store it.

Of a linear of I inputs and O outputs: qweight int32 [I * bits / 32, O], codes along the inputs; qzeros int32
[groups, O * bits / 32], zero points along the outputs, one less than they are unless checkpoint_format is gptq_v2;
scales [groups, O]. Lower bits come first. With desc_act, g_idx int32 [I] has the group of each input.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from ....errors import MODEL, FatalError
from ....kernels.quantized import affine, cuda_layouts
from ..formats._part import Part
from ..formats._stacks import Stacked, StackOfParts, StoredStack
from ..shard import Shard
from ..weights.slicing import Field, Ratio, Source, Turns
from . import is_stored
from ._part import GroupedFormat, GroupedPart, Grouping, check_settings, group_size, unpack, unpack_transposed

PIECE = cuda_layouts.INT4_INPUTS  # of codes of 4 bits
HARMLESS = ".g_idx", ".bias"  # the order of the inputs, and zeros where the model has no biases


@dataclass(frozen=True)
class Scheme(GroupedFormat):
    offset: int  # of the zero points above what is stored
    ordered: bool  # by g_idx

    def part(self, inputs: Shard, outputs: Sequence[Shard], bias: bool, sources: Sequence[Source]) -> Part:
        return (OrderedPart if self.ordered else GroupedPart)(self, inputs, outputs, bias, sources)

    def stack(self, layer: Stacked, sources: Sequence[Source]) -> StoredStack:
        return (OrderedStack if self.ordered else StackOfParts)(self.part, layer, sources)

    def fields(self, inputs: Shard) -> Sequence[Field]:
        bits, group, _ = self.grouping
        packed, grouped = Ratio(1, 32 // bits), Ratio(1, group, True, everywhere=self.ordered)
        zeros = self.grouping.zeros(self.offset)
        fields = [
            Field("qweight", "io", torch.int32, ratios={"i": packed}, made_up=self.grouping.codes),
            Field("qzeros", "io", torch.int32, ratios={"i": grouped, "o": packed}, made_up=zeros),
            Field("scales", "io", torch.float32, ratios={"i": grouped}, made_up=self.grouping.scales),
        ]
        if self.ordered:
            fields.append(Field("g_idx", "si", torch.int32, made_up=Turns(-(-inputs.size // group))))
        return fields

    def unpacked(self, part: GroupedPart) -> tuple[Tensor, Tensor, Tensor]:
        """codes uint8 [O, I], and of the stored groups scales f32 and zeros int16 [O, groups]."""
        bits = self.grouping.bits
        zeros = unpack(part.read("qzeros"), bits).to(torch.int16) + self.offset
        return unpack_transposed(part.read("qweight"), bits), part.read("scales").t(), zeros.t()

    def decode(self, part: GroupedPart) -> tuple[Tensor, Tensor, Tensor]:
        codes, scales, zeros = self.unpacked(part)
        return codes, part.spread(scales), part.spread(zeros)


class OrderedPart(GroupedPart):
    """Outputs with desc_act: inputs of one group lie anywhere. They are brought together, in x as in the weight, and
    each group is filled up to a multiple of what kernels take, as those that a rank has of it may be any number. So are
    all inputs, as codes of 4 bits lie in packed tiles.
    """

    form: Scheme
    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    g_idx: Tensor  # [sources, I]
    order: Tensor  # [I'] which input each is; this rank's number of inputs where it fills up

    @property
    def matrix(self) -> None:
        """There is none: what is kept has its inputs in another order."""
        return None

    def encoded(self) -> Sequence[Tensor]:
        codes, scales, zeros = self.form.unpacked(self)
        groups = scales.shape[1]
        g_idx = self._groups(0, groups)
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
        ordered = pad(codes, (0, 1)).index_select(1, self.order)
        return [one.contiguous() for one in (ordered, scales[:, of], zeros[:, of])]

    def kept_bits(self, device: torch.device) -> float:
        """Bits as far as the sizes tell: where a rank has a part of the inputs, g_idx has how many of each group it
        has."""
        bits, group, symmetric = self.grouping
        width, size = self.inputs.width, self.inputs.size
        if not width:
            return 0
        each = max(group * width // size + affine.UNIT // 2, affine.UNIT)  # of a group, as it is filled up on average
        filled = width if width == size else size // group * each
        kept = -(-filled // PIECE) * PIECE
        unit = self.unit if kept == width == size else affine.UNIT
        of_order = 8 * torch.int64.itemsize / max(self.width, 1)
        return (affine.kept_bits(bits, unit, kept, symmetric, device) + of_order) * kept / width

    def _groups(self, source: int, count: int) -> Tensor:
        """Which of so many groups each input is of in the outputs of this source, [I]."""
        g_idx = self.g_idx[source]
        if g_idx.numel() and not 0 <= int(g_idx.min()) <= int(g_idx.max()) < count:
            raise FatalError(f"{self.sources[source].path}.g_idx has numbers of groups outside 0 to {count - 1}", MODEL)
        return g_idx

    def _slices(self) -> Iterator[slice]:
        """The outputs of each source."""
        ends = itertools.accumulate((shard.width for shard in self.outputs), initial=0)
        return itertools.starmap(slice, itertools.pairwise(ends))

    def plain(self) -> Tensor:
        """The weight [O, I] in f32, its inputs where they were."""
        codes, scales, zeros = self.form.unpacked(self)
        made = []
        for source, rows in enumerate(self._slices()):
            at = self._groups(source, scales.shape[1]).long()
            made.append((codes[rows] - zeros[rows][:, at]) * scales[rows].float()[:, at])
        return torch.cat(made)

    def finish(self) -> None:
        if (self.g_idx != self.g_idx[0]).any():
            raise FatalError(
                f"{', '.join(one.path for one in self.sources)}: g_idx differ, and these are multiplied as one: "
                "quantise them with the same order of inputs",
                MODEL,
            )
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


class OrderedStack(StackOfParts):
    """Experts with desc_act, of which each orders its inputs in another way: they are dequantised when they are
    loaded."""

    packs_for_host = False

    def make(self, layer: Stacked) -> Tensor:
        shape = layer.experts.width, layer.width, layer.inputs.width
        made = torch.empty(shape, dtype=layer.model_dtype, device=layer.get_parameter("scales").device)
        for expert in range(len(made)):
            self.take(layer, expert)
            made[expert] = cast(OrderedPart, self.part).plain()
        self.drop()
        return made

    def kept_bits(self, layer: Stacked, device: torch.device) -> float:
        return 0


def match(settings: dict[str, Any], path: str, names: Collection[str]) -> Scheme | None:
    check_settings(settings, bits=(4, 8), checkpoint_format=(None, "gptq", "gptq_v2"), desc_act=(None, False, True))
    if not is_stored(path, "qweight", names):
        return None
    grouping = Grouping(settings["bits"], group_size(settings, "group_size"), settings.get("sym") is not False)
    offset = int(settings.get("checkpoint_format") != "gptq_v2")
    return Scheme(grouping, offset, bool(grouping.group and settings.get("desc_act")))
