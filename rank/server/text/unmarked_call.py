"""A call in JSON that is the whole answer, bare or in a block of code, as models write that forget the markers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from .events import Event, Text, ToolCallEnd, ToolCallStart
from .heads import Head
from .json_calls import JsonCalls, JsonValue
from .lark import Called, Lark, any_of
from .schema_values import is_json

FIRST = ("{", "`")
OPENING = r"(?:```(?:json)?\s{0,8})?"
NAME = r'\{\s{0,16}"name"\s{0,4}:\s{0,4}'  # before a function's name in quotation marks
HEAD = Head(
    rf'{OPENING}(?={NAME}"(?P<name>[\w.-]{{1,128}})")',
    *(f'{opening}{{"name": "f"' for opening in ("", "```json\n", "```\n")),
)
# A grammar has these between a name and its arguments, and behind them.
BETWEEN = r'\s{0,4},\s{0,16}"arguments"\s{0,4}:\s{0,4}'
END = r"/\s{0,16}\}\s{0,8}(```\s{0,4})?/"
CLOSING = re.compile(r"\s*(```)?\s*")


def without_unmarked_calls(tools: Iterable[Called]) -> str:
    """A terminal's condition: the text does not begin as such a call of one of the tools."""
    names = any_of(tuple(tool.name for tool in tools))
    return rf'~/\s*{OPENING}{NAME}"({names})"(?s:.*)/'


def unmarked_calls(lark: Lark, tools: Iterable[Called]) -> str:
    """The expression of such a call. All before the arguments is one terminal: any text would swallow a shorter one."""
    heads = ((rf'/\s{{0,4}}{OPENING}{NAME}"{any_of((tool.name,))}"{BETWEEN}/', tool) for tool in tools)
    return f"({' | '.join(f'{head} {tool.arguments}' for head, tool in heads)}) {END}"


class UnmarkedCall:
    """Holds an answer back as long as it may be one call of a known tool and nothing else."""

    def __init__(self, index: int, tools: Collection[str]):
        self._index = index
        self._tools = tools
        self._held = ""
        self._begin: int | None = None  # where the object begins; None as long as no head came
        self._end = 0  # how far the object was read
        self._value = JsonValue("")

    @property
    def begun(self) -> bool:
        return bool(self._held)

    def feed(self, text: str) -> str | None:
        """None as long as this may be a call, else all text so far."""
        if not self._held and text[:1] not in FIRST:
            return text
        self._held += text
        if self._begin is None:
            head = HEAD.match(self._held)
            if head is None:
                return None if HEAD.may_come(self._held) else self._held
            if head["name"] not in self._tools:
                return self._held
            self._begin = self._end = head.end()
        if not self._value.done:
            self._end = self._value.feed(self._held, self._end)
        if self._value.done and not "```".startswith(self._held[self._end :].strip()):
            return self._held
        return None

    def finish(self) -> list[Event]:
        """The call's events, or the text."""
        calls = JsonCalls("", self._index, known=self._tools)
        if self._value.done and CLOSING.fullmatch(self._held, self._end):
            whole = self._held[self._begin : self._end]
            events, _ = calls.feed(whole)
            kinds = [type(event) for event in events]
            if kinds.count(ToolCallStart) == kinds.count(ToolCallEnd) == 1 and Text not in kinds and is_json(whole):
                return events
        return [Text(self._held)] if self._held else []
