"""Arguments between tags, one pair for each, as models with XML-like calls write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .heads import Head
from .schema_values import quote, to_json, types_of
from .stop_strings import partial_suffix


class Tags(NamedTuple):
    """How a format writes arguments."""

    head: Head  # before a value; group 1 is the argument's name
    close: str  # behind a value
    end: tuple[str, ...]  # any of these ends the arguments; what is in `kept` is left in the text
    kept: tuple[str, ...] = ()
    lines: bool = False  # a value stands on lines of its own: the newlines around it are not part of it


class TaggedArguments:
    """Reads them as JSON. A text is passed on as it comes, other values when they are complete.

    A schema's types decide what a value is: `5` is a text where the schema asks for one.
    """

    def __init__(self, tags: Tags, schema: Mapping[str, Any]):
        self._tags = tags
        properties = schema.get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._begun = False  # the opening brace was written
        self._held = ""
        self._types: frozenset[str] | None = None  # of the value that is being read; None: between values
        self._first = False  # nothing of the value came yet
        self._value = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        text, self._held = self._held + text, ""
        written = ""
        while text:
            if self._types is not None:
                more, text = self._read_value(text)
                written += more
                if self._held:
                    break
                continue
            body = text.lstrip()
            if (end := next((one for one in (*self._tags.end, *self._tags.kept) if body.startswith(one)), "")) or (
                not body or any(one.startswith(body) for one in (*self._tags.end, *self._tags.kept))
            ):
                if not end:
                    self._held = text
                    break
                return written + self._close(), body if end in self._tags.kept else body[len(end) :]
            head = self._tags.head.match(body)
            if head is None:
                if self._tags.head.may_come(body):
                    self._held = text
                    break
                return written + self._close(), text
            written += self._begin(head[1])
            text = body[head.end() :]
        return written, None

    def _begin(self, name: str) -> str:
        self._types, self._value, self._first = types_of(self._properties.get(name)), "", True
        opening = ", " if self._begun else "{"
        self._begun = True
        return f"{opening}{quote(name)}: {chr(34) if self._as_text else ''}"

    @property
    def _as_text(self) -> bool:
        return self._types == {"string"}

    def _read_value(self, text: str) -> tuple[str, str]:
        """More of the value's JSON, and what follows it."""
        if self._first and self._tags.lines:
            text = text.removeprefix("\n")
        self._first = False
        at = text.find(self._tags.close)
        newline = "\n" if self._tags.lines else ""
        if at >= 0:
            value = self._value + text[:at].removesuffix(newline)
            found = quote(value)[1:] if self._as_text else to_json(value, self._types or frozenset())
            self._types = None
            return found, text[at + len(self._tags.close) :]
        size = partial_suffix(text, (newline + self._tags.close,)) or partial_suffix(text, (self._tags.close,))
        self._held = text[len(text) - size :]
        body = text[: len(text) - size]
        if self._as_text:
            return quote(body)[1:-1], ""
        self._value += body
        return "", ""

    def _close(self) -> str:
        return "}" if self._begun else "{}"

    def finish(self) -> str:
        """A value that has not ended stays open, as in a call in JSON."""
        if self._types is None:
            return self._close()
        return quote(self._held)[1:-1] if self._as_text else self._value + self._held
