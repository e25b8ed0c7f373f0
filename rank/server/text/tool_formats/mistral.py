"""Mistral: [TOOL_CALLS][{"name": …, "arguments": {…}}, …], or [TOOL_CALLS]name{…} for each call in newer models.

Between name and arguments there may be [CALL_ID] with an id, and [ARGS].
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Sequence

from ..events import Event, Text, ToolCallArguments, ToolCallEnd, ToolCallStart
from ..json_calls import JsonCalls, JsonValue
from ..lark import Lark
from . import CallableTool, ToolCallFormat, ToolCallParser

OPEN = "[TOOL_CALLS]"
MARKERS = ("[CALL_ID]", "[ARGS]")
LIST = re.compile(r"\s{0,8}(?:\[\s{0,8})?\{")
LIST_BEGINNING = re.compile(r"\s{0,8}(?:\[\s{0,8})?")
# The bounds keep a head that never ends from being read again and again.
HEAD = re.compile(r"\s{0,8}([\w.:/-]{1,128})\s{0,8}(?:\[CALL_ID\]\s{0,8}(\w{1,64})\s{0,8})?(?:\[ARGS\]\s{0,8})?\{")
EXAMPLE = "f[CALL_ID]i[ARGS]{"  # a text may become a head if some end of this makes it one
ID = re.compile(r"[A-Za-z0-9]{9}")


def make_id() -> str:
    # The templates refuse other ids when the call comes back in the history.
    return "".join(random.choices(string.ascii_letters + string.digits, k=9))


class NamedCall:
    """name[CALL_ID]id[ARGS]{…}: one call, which ends with its arguments."""

    def __init__(self, marker: str, index: int):
        self._marker = marker
        self._index = index
        self._head = ""
        self._arguments: JsonValue | None = None

    def feed(self, text: str) -> tuple[list[Event], str | None]:
        events: list[Event] = []
        if self._arguments is None:
            self._head += text
            head = HEAD.match(self._head)
            if head is None:
                if any(HEAD.fullmatch(self._head + EXAMPLE[i:]) for i in range(len(EXAMPLE))):
                    return [], None
                return [Text(self._marker)], self._head
            name, id = head.groups()
            events.append(ToolCallStart(self._index, id if id and ID.fullmatch(id) else make_id(), name))
            self._arguments = JsonValue()
            text = self._head[head.end() - 1 :]
        end = self._arguments.feed(text, 0)
        if end:
            events.append(ToolCallArguments(self._index, text[:end]))
        if not self._arguments.done:
            return events, None
        events.append(ToolCallEnd(self._index))
        return events, text[end:]

    def finish(self) -> list[Event]:
        return [Text(self._marker + self._head)] if self._arguments is None else [ToolCallEnd(self._index)]


class MistralCalls:
    """Whichever form the first character tells."""

    def __init__(self, marker: str, index: int):
        self._marker = marker
        self._index = index
        self._form: ToolCallParser | None = None
        self._held = ""

    def feed(self, text: str) -> tuple[list[Event], str | None]:
        if self._form is None:
            text = self._held + text
            if LIST.match(text):
                self._form = JsonCalls(self._marker, self._index, make_id=make_id)
            elif LIST_BEGINNING.fullmatch(text):
                self._held = text
                return [], None
            else:
                self._form = NamedCall(self._marker, self._index)
        return self._form.feed(text)

    def finish(self) -> list[Event]:
        return [Text(self._marker + self._held)] if self._form is None else self._form.finish()


def grammar(lark: Lark, tools: Sequence[CallableTool], several: bool) -> str:
    """name[ARGS]{…} where the tokenizer has [ARGS], else a list of objects."""
    if "[ARGS]" in lark.added:
        calls = " | ".join(f"{lark.literal(tool.name)} {lark.marker('[ARGS]')} {tool.arguments}" for tool in tools)
        one = lark.rule(calls)
        return f"{one} ({lark.marker(OPEN)} {one})*" if several else one
    one = lark.rule(" | ".join(lark.call(tool.name, tool.arguments) for tool in tools))
    return f'"[" {one} (", " {one})* "]"' if several else f'"[" {one} "]"'


FORMAT = ToolCallFormat(
    matches=lambda template: OPEN in template,
    opens=(OPEN,),
    parser=MistralCalls,
    markers=MARKERS,
    grammar=grammar,
)
