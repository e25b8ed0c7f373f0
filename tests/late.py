"""Modules that are imported where they are first used: each of pytest's workers imports all files of tests."""

from __future__ import annotations

import importlib
from typing import Any


class Late:
    """`openai = Late("openai")` in place of `import openai`, which takes two seconds, and anthropic three."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks each name of a module whether it is a test, a fixture or a mock
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)
