"""[TOOL_CALLS][{"name": …, "arguments": {…}}, …], or [TOOL_CALLS]name{…} in newer models: Mistral."""

from __future__ import annotations

import random
import string

from . import CallParser, Syntax
from .json_calls import JsonCalls


class NamedCall:
    """name[ARGS]{…}: the newer form, one marker per call."""

    def __init__(self) -> None:
        self._head = ""
        self._named = False

    def feed(self, text: str) -> list[tuple[str, str]]:
        if self._named:
            return [("arguments", text)] if text else []
        self._head += text
        start = self._head.find("{")
        if start < 0:
            return []
        name = self._head[:start].removesuffix("[ARGS]").strip()
        self._named = True
        return [("name", name), ("arguments", self._head[start:])]

    def close(self) -> str:
        return "" if self._named else MistralCalls.MARKER + self._head


class MistralCalls:
    """Whichever form the first character tells. A further marker starts the next call."""

    MARKER = "[TOOL_CALLS]"

    def __init__(self, marker: str):
        self._marker = marker
        self._form: CallParser | None = None
        self._held = ""

    def feed(self, text: str) -> list[tuple[str, str]]:
        text = self._held + text
        self._held = ""
        events: list[tuple[str, str]] = []
        while (at := text.find(self.MARKER)) >= 0:
            events += self._feed(text[:at])
            self._form = None
            text = text[at + len(self.MARKER):]
        at = text.rfind("[")  # of a further marker, perhaps
        if at >= 0 and self.MARKER.startswith(text[at:]) and not isinstance(self._form, JsonCalls):
            self._held, text = text[at:], text[:at]
        return events + self._feed(text)

    def _feed(self, text: str) -> list[tuple[str, str]]:
        if self._form is None:
            text = text.lstrip()
            if not text:
                return []
            self._form = JsonCalls(self._marker) if text[0] in "[{" else NamedCall()
        return self._form.feed(text)

    def close(self) -> str:
        if self._form is None:
            return self._marker + self._held
        return self._form.close()


def make_id() -> str:
    # The templates refuse other ids when the call comes back in the history.
    return "".join(random.choices(string.ascii_letters + string.digits, k=9))


SYNTAX = Syntax(
    name="mistral",
    opens=("[TOOL_CALLS]",),
    close="",
    matches=lambda template: "[TOOL_CALLS]" in template,
    parser=MistralCalls,
    make_id=make_id,
)
