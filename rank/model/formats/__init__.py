"""Weight formats: one file each, with a class `Part` that holds some outputs of a linear.

A linear is a list of parts, so its outputs may differ in format, as in mixed GGUF files. A part names its tensors
(`fields`) and computes its outputs (`forward`). Once it is loaded, `finish` may convert it: it repacks it for the
device, or quantises it where a model is quantised while loading. A format is found by the name of its file.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..shard import Shard
from ..weights.slicing import Source
from ._in_situ import InSitu
from .dense import Part

MakePart = Callable[[Shard, Sequence[Shard], bool, Sequence[Source]], Part]  # inputs, outputs, bias, sources
ChooseFormat = Callable[[str], MakePart]  # from a tensor's path in the checkpoint, without the field's name


def dense(path: str) -> MakePart:
    """The default: unquantised weights of 16 or 32 bits for every linear."""
    return Part


def in_situ(name: str) -> ChooseFormat:
    """Every linear is quantised to this format while it is loaded, or none is.

    Where a rank's inputs are not whole groups of it, the format takes its place that it names for that, if it does.
    """
    if name == "none":
        return dense
    part = _part(name)
    form = InSituFormat(part, _part(part.smaller_groups) if part.smaller_groups else part)
    return lambda path: form


@dataclass(frozen=True)
class InSituFormat:
    """What makes parts of `part`, or of `other` where a rank's inputs are not whole groups of it."""

    part: type[InSitu]
    other: type[InSitu]

    @property
    def stack_unit(self) -> int:
        """Neighbouring inputs of an expert that a cut leaves together."""
        return self.part.codec.GROUP

    @property
    def smaller(self) -> InSituFormat | None:
        """What experts get whose inputs cannot be cut between groups."""
        return InSituFormat(self.other, self.other) if self.other is not self.part else None

    def __call__(self, inputs: Shard, outputs: Sequence[Shard], bias: bool, sources: Sequence[Source]) -> InSitu:
        return (self.part if self.part.takes(inputs) else self.other)(inputs, outputs, bias, sources)


def _part(name: str) -> type[InSitu]:
    part: type[InSitu] = importlib.import_module(f".{name}", __name__).Part
    return part
