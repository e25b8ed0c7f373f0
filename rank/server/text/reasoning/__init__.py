"""How models mark their thoughts: one file per format, found by its name. Each has a FORMAT."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection
from typing import NamedTuple


class ReasoningFormat(NamedTuple):
    """The markers around a model's thoughts. Any of `opens` begins them, any of `closes` ends them."""

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    # Whether a model has it, by its chat template and by its tokenizer's added tokens.
    matches: Callable[[str, Collection[str]], bool]
    dropped: tuple[str, ...] = ()  # markers that stand around the answer itself, and are not shown
    joint: str = ""  # what a model writes between its thoughts and its answer, instead of newlines
    around: tuple[str, str] = ("", "")  # which of the dropped ones it writes before and behind an answer
    first: bool = False  # thoughts are only what an answer begins with

    @property
    def open(self) -> str:
        return self.opens[0]

    @property
    def close(self) -> str:
        return self.closes[0]

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.opens, *self.closes, *self.dropped)

    def opened(self, text: str) -> bool:
        """Whether the text ends within thoughts."""
        return max(map(text.rfind, self.opens)) > max(map(text.rfind, self.closes))


def names() -> list[str]:
    """The formats that there is a file for."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(name: str) -> ReasoningFormat:
    return importlib.import_module(f".{name}", __name__).FORMAT


def choose(template: str, added: Collection[str]) -> ReasoningFormat | None:
    """The format of a model with this chat template and these added tokens."""
    return next((one for one in map(find, names()) if one.matches(template, added)), None)
