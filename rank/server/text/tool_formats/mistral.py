"""Mistral: [TOOL_CALLS][{"name": …, "arguments": {…}}, …], or [TOOL_CALLS]name{…} for each call in newer models.

Between name and arguments there may be [CALL_ID] with an id, and [ARGS].
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Sequence

from ..events import Event, Text
from ..headed_calls import HeadedCalls, JsonArguments
from ..heads import NAME, Head
from ..json_calls import JsonCalls
from ..lark import Lark
from . import CallableTool, ToolCallFormat, ToolCallParser, Tools

OPEN = "[TOOL_CALLS]"
MARKERS = ("[CALL_ID]", "[ARGS]")
LIST = re.compile(r"\s{0,8}(?:\[\s{0,8})?\{")
LIST_BEGINNING = re.compile(r"\s{0,8}(?:\[\s{0,8})?")
HEAD = Head(
    rf"\s{{0,8}}{NAME}\s{{0,8}}(?:\[CALL_ID\]\s{{0,8}}(?P<id>\w{{1,64}})\s{{0,8}})?(?:\[ARGS\]\s{{0,8}})?(?=\{{)",
    "f[CALL_ID]i[ARGS]{",
)
ID = re.compile(r"[A-Za-z0-9]{9}")


def make_id(head: re.Match[str] | None = None) -> str:
    """The model's own id, if the templates take it: they refuse others when the call comes back in the history."""
    if head is not None and head["id"] and ID.fullmatch(head["id"]):
        return head["id"]
    return "".join(random.choices(string.ascii_letters + string.digits, k=9))


class MistralCalls:
    """Whichever form the first character tells."""

    def __init__(self, marker: str, index: int, tools: Tools):
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
                self._form = HeadedCalls(
                    self._marker, self._index, HEAD, lambda name: JsonArguments(), one=True, make_id=make_id
                )
        return self._form.feed(text)

    def finish(self) -> list[Event]:
        return [Text(self._marker + self._held)] if self._form is None else self._form.finish()


def grammar(lark: Lark, tools: Sequence[CallableTool], several: bool, marker: str) -> str:
    """name[ARGS]{…} where the tokenizer has [ARGS], else a list of objects."""
    if "[ARGS]" in lark.added:
        calls = " | ".join(f"{lark.literal(tool.name)} {lark.marker('[ARGS]')} {tool.arguments}" for tool in tools)
        one = lark.rule(calls)
        return lark.repeated(one, lark.marker(OPEN)) if several else one
    return lark.calls(tools, several)


FORMAT = ToolCallFormat(
    matches=lambda template: OPEN in template,
    opens=(OPEN,),
    parser=MistralCalls,
    markers=MARKERS,
    grammar=grammar,
)
