"""Weight formats: one file each, with a class `Part` that holds some outputs of a linear.

A linear is a list of parts, so its outputs may differ in format, as in mixed GGUF files. A part names its tensors
(`fields`) and computes its outputs (`forward`). Once it is loaded, `finish` may convert it: it repacks it for the
device, or quantises it where a model is quantised while loading. A format is found by the name of its file.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

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
    if not part.smaller_groups:
        return lambda path: part
    other = _part(part.smaller_groups)

    def make(inputs: Shard, outputs: Sequence[Shard], bias: bool, sources: Sequence[Source]) -> Part:
        return (part if part.takes(inputs) else other)(inputs, outputs, bias, sources)

    return lambda path: make


def _part(name: str) -> type[InSitu]:
    part: type[InSitu] = importlib.import_module(f".{name}", __name__).Part
    return part
