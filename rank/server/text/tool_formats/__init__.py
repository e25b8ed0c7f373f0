"""How models write tool calls: one file per format, found by its name. Each has a FORMAT."""

from __future__ import annotations

import importlib
import pkgutil
import uuid
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ..events import Event
from ..lark import Lark


class ToolCallParser(Protocol):
    """Reads what follows an opening marker, as it comes.

    Its events are those of calls, and Text for what turned out to be no call; their order is the text's.
    """

    def feed(self, text: str) -> tuple[list[Event], str | None]:
        """Events, and what follows the calls once they have ended: an end of all text so far."""

    def finish(self) -> list[Event]:
        """No more text comes."""


class CallableTool(NamedTuple):
    """A tool, for the grammar of its calls."""

    name: str
    arguments: str  # the expression of its arguments as JSON


class ToolCallFormat(NamedTuple):
    """One way to write tool calls."""

    matches: Callable[[str], bool]  # whether a chat template teaches this format; no two formats match one template
    opens: tuple[str, ...]  # markers, each of which begins one call or several
    parser: Callable[[str, int], ToolCallParser]  # made of the marker that was met and the index of the next call
    markers: tuple[str, ...] = ()  # what else the parser looks for: it is shown to it even as a special token
    bare: bool = False  # a call may also be the answer's first text, beginning with a brace: its marker is ""
    # One call or, where the last argument is true, also several, as an expression: what follows the first marker of
    # `opens`, or the whole where calls are bare. None: calls cannot be enforced.
    grammar: Callable[[Lark, Sequence[CallableTool], bool], str] | None = None


def call_id() -> str:
    """An id for a tool call, as OpenAI's look."""
    return "call_" + uuid.uuid4().hex[:24]


def names() -> list[str]:
    """The formats that there is a file for."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(name: str) -> ToolCallFormat:
    return importlib.import_module(f".{name}", __name__).FORMAT


def choose(template: str) -> ToolCallFormat | None:
    """The format that a chat template teaches its model."""
    return next((one for one in map(find, names()) if one.matches(template)), None)
