"""Formats that weights are quantised to in situ: read plain, and encoded as soon as they are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....errors import USAGE, FatalError
from ....kernels.quantized.codec import Encoder
from ..shard import Shard, whole_groups
from ..weights.slicing import Field, Source
from ._format import Format
from ._packed import PackedPart


@dataclass(frozen=True)
class InSitu(Format):
    """Weights that are encoded by `codec` once they are loaded."""

    name: str  # as users write it
    codec: Encoder
    smaller: InSitu | None = None  # takes its place where a rank's inputs are not whole groups; None: they are refused

    @property
    def cut_unit(self) -> int:  # type: ignore[override]  # a constant of other formats
        return self.codec.GROUP

    def takes(self, inputs: Shard) -> bool:
        """Whether this rank's inputs are whole groups."""
        return inputs.size % self.codec.GROUP == inputs.width % self.codec.GROUP == 0

    def part(self, inputs: Shard, outputs: Sequence[Shard], bias: bool, sources: Sequence[Source]) -> InSituPart:
        form = self.smaller if self.smaller is not None and not self.takes(inputs) else self
        return InSituPart(form, inputs, outputs, bias, sources)

    def fitting(self, path: str, size: int, ranks: int) -> Format:
        if self.smaller is not None and not whole_groups(size, ranks, self.cut_unit):
            return self.smaller.fitting(path, size, ranks)
        if size % self.cut_unit:
            groups = f"and groups have {self.cut_unit}: serve this model without --isq"
            raise self.refused(f"{path} has {size} inputs, {groups}")
        return super().fitting(path, size, ranks)

    def refused(self, text: str) -> FatalError:
        return FatalError(f"--isq {self.name}: {text}", USAGE)


class InSituPart(PackedPart):
    """Some outputs of a linear, quantised by the format's codec.

    Until it is encoded, the weight has the checkpoint's dtype, not the model's, which may round it. A tied head is
    encoded from the embedding's table. That stays as it is, for tokens are looked up there: the head's codes are memory
    of its own, but a step reads half as much or less.
    """

    fields = (Field("weight", "oi", stored=True), Field("bias", "o"))
    rows_apart = True
    codec: Encoder

    def __init__(self, form: InSitu, inputs: Shard, outputs: Sequence[Shard], bias: bool, sources: Sequence[Source]):
        super().__init__(inputs, outputs, bias, sources)
        self.name, self.codec = form.name, form.codec
        if form.takes(inputs):
            return
        path, group = sources[0].path, f"{form.name} encodes groups of {self.codec.GROUP}"
        if inputs.size % self.codec.GROUP:
            raise form.refused(f"{path} has {inputs.size} inputs, and {group}: serve this model without --isq")
        raise form.refused(
            f"tensor parallelism leaves each rank {inputs.width} of the {inputs.size} inputs of {path}, and {group}, "
            "which stay whole: choose another --tp, or serve without --isq"
        )

    def encoded(self) -> Sequence[Tensor]:
        return self.codec.encode(self.weight.data)

    def kept_bits(self, device: torch.device) -> float:
        return self.codec.kept_bits(self.inputs.width, device)

    def finish(self) -> None:
        packed = self.codec.pack(*self.encoded())
        del self.weight
        self.hold(packed)

    def plain_bytes(self, stored: torch.dtype) -> int:
        return self.weight.numel() * stored.itemsize if self.sources else 0
