"""One file per architecture, named after the `model_type` of config.json. `supported` works without torch."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType


def supported() -> list[str]:
    """The names of all architectures."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(model_type: str) -> ModuleType:
    """The module of a supported model type: its `Args` and its `Model`."""
    return importlib.import_module(f".{model_type}", __name__)
