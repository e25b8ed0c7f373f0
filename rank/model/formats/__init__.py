"""How weights are stored and multiplied: one file a format, each with a class `Part`, some outputs of a linear.

A linear is a list of parts, so that its outputs may differ in format, as in mixed GGUF files. A part names its tensors
(`fields`), multiplies (`forward`), and may bring what was loaded into another form once it is whole (`finish`): for the
device, or, where a model is quantised while it is loaded, in its format.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

from .dense import Part

ChooseFormat = Callable[[str], type[Part]]  # from a tensor's path in the checkpoint, without the field's name


def dense(path: str) -> type[Part]:
    """Every linear as checkpoints in 16 and 32 bit hold it."""
    return Part


def names() -> list[str]:
    """The formats that there is a file for."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def in_situ(name: str) -> ChooseFormat:
    """Quantise in this format while loading, all linears but the head."""
    part = importlib.import_module(f".{name}", __name__).Part
    return lambda path: Part if path.startswith(("lm_head", "model.embed_tokens")) else part
