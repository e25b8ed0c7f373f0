"""One file per architecture; its name is the `model_type` of config.json. No torch is imported to know the names."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType


def supported() -> list[str]:
    """The model types that there is a file for."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(model_type: str) -> ModuleType:
    """The module of a supported model type: its `Args` and its `Model`."""
    return importlib.import_module(f".{model_type}", __name__)
