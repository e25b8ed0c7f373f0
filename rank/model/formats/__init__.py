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
from .dense import Part

MakePart = Callable[[Shard, Sequence[Shard], bool, Sequence[Source]], Part]  # inputs, outputs, bias, sources
ChooseFormat = Callable[[str], MakePart]  # from a tensor's path in the checkpoint, without the field's name


def dense(path: str) -> MakePart:
    """The default: unquantised weights of 16 or 32 bits for every linear."""
    return Part


def in_situ(name: str) -> ChooseFormat:
    """Every linear is quantised to this format while it is loaded, or none is."""
    if name == "none":
        return dense
    part: type[Part] = importlib.import_module(f".{name}", __name__).Part
    return lambda path: part
