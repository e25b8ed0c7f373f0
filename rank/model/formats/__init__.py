"""Weight formats: one file each, with a class `Part` that holds some outputs of a linear.

A linear is a list of parts, so its outputs may differ in format, as in mixed GGUF files. A part names its tensors
(`fields`) and computes its outputs (`forward`). Once it is loaded, `finish` may convert it: it repacks it for the
device, or quantises it where a model is quantised while loading.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

from .dense import Part

ChooseFormat = Callable[[str], type[Part]]  # from a tensor's path in the checkpoint, without the field's name


def dense(path: str) -> type[Part]:
    """The default: unquantised weights of 16 or 32 bits for every linear."""
    return Part


def names() -> list[str]:
    """The names of all formats."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def in_situ(name: str) -> ChooseFormat:
    """Quantise all linears but the head in this format while loading."""
    part = importlib.import_module(f".{name}", __name__).Part
    return lambda path: Part if path.startswith(("lm_head", "model.embed_tokens")) else part
