"""How models write tool calls: one file per syntax, each with two markers and a parser for what is between them."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import NamedTuple, Protocol


class CallParser(Protocol):
    """Reads the text between the markers as it comes."""

    def feed(self, text: str) -> list[tuple[str, str]]:
        """Events: ("name", function) starts a call, ("arguments", part) adds to the JSON of its arguments."""

    def close(self) -> str:
        """The end marker, or the end of the text, has come. Returns the text that turned out to be no call."""


def call_id() -> str:
    """An id for a tool call, as OpenAI's look."""
    return "call_" + uuid.uuid4().hex[:24]


class Syntax(NamedTuple):
    """One way to write tool calls."""

    name: str
    opens: tuple[str, ...]  # "{" is also the first character of the call
    close: str  # "": the calls run to the end
    matches: Callable[[str], bool]  # whether a chat template teaches this syntax
    parser: Callable[[str], CallParser]  # made of the open marker that was met
    at_start: bool = False  # calls come before any other text or not at all
    make_id: Callable[[], str] = call_id


def choose(template: str) -> Syntax | None:
    """The syntax that a chat template teaches its model."""
    from . import hermes, llama3, mistral

    for module in (hermes, mistral, llama3):
        if module.SYNTAX.matches(template):
            return module.SYNTAX
    return None
