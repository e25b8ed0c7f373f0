"""How models write tool calls: one file per format, found by its name. Each has a FORMAT."""

from __future__ import annotations

import importlib
import pkgutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ..events import Event
from ..lark import Lark

Tools = Mapping[str, Mapping[str, Any]]  # the functions that the model was offered, with their parameters' JSON schemas


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
    # Made of the marker that was met, the index of the next call and the tools.
    parser: Callable[[str, int, Tools], ToolCallParser]
    markers: tuple[str, ...] = ()  # what else the parser looks for: it is shown to it even as a special token
    bare: str = ""  # a call may also be the answer's first text, beginning with one of these: its marker is ""
    models: tuple[str, ...] = ()  # model types that write so, whatever their template says
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


def choose(template: str, model_type: str = "") -> ToolCallFormat | None:
    """The format that a chat template teaches its model, else the one that such models write. None where neither is
    known, or the template takes no tools."""
    formats = [find(name) for name in names()]
    found = next((one for one in formats if one.matches(template)), None)
    if found is None and "tools" in template:
        found = next((one for one in formats if model_type in one.models), None)
    return found
