"""Arguments between tags, one pair for each, as models with XML-like calls write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from .argument_schema import Parameters
from .heads import Head
from .schema_values import is_json, quote, to_json, within_string
from .stop_strings import partial_suffix

STRING = re.compile(r'(?:[^"\\\x00-\x1f]|\\.)*')  # more of a string of JSON, without its end


class Tags(NamedTuple):
    """How a format writes arguments."""

    head: Head  # before a value; group 1 is the argument's name
    close: str  # behind a value
    end: tuple[str, ...]  # any of these ends the arguments; what is in `kept` is left in the text
    kept: tuple[str, ...] = ()
    lines: bool = False  # a value stands on lines of its own: the newlines around it are not part of it
    # What a model writes before and behind an argument's name.
    before: str = ""
    behind: str = ""


class TaggedArguments:
    """Reads them as JSON. A text is passed on as it comes, other values when they are complete.

    A schema's types decide what a value is: `5` is a text where the schema asks for one.
    """

    def __init__(self, tags: Tags, schema: Mapping[str, Any]):
        self._tags = tags
        self._parameters = Parameters(schema)
        self._begun = False  # the opening brace was written
        self._held = ""
        self._types: frozenset[str] | None = None  # of the value that is being read; None: between values
        self._first = False  # nothing of the value came yet
        self._value = ""  # of no text: what came so far
        self._from = 0  # where a closing tag of it is looked for
        self._passed = -1  # where the first one is that seemed to stand in a string
        self._within = 0  # behind the last such
        self._newline = "\n" if tags.lines else ""

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
        self._types, self._value, self._first = self._parameters.types(name), "", True
        self._from, self._passed = 0, -1
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
        return self._read_text(text) if self._as_text else self._read_other(text)

    def _read_text(self, text: str) -> tuple[str, str]:
        at = text.find(self._tags.close)
        if at >= 0:
            self._types = None
            return quote(text[:at].removesuffix(self._newline))[1:], text[at + len(self._tags.close) :]
        size = partial_suffix(text, (self._newline + self._tags.close,)) or partial_suffix(text, (self._tags.close,))
        self._held = text[len(text) - size :]
        return quote(text[: len(text) - size])[1:-1], ""

    def _read_other(self, text: str) -> tuple[str, str]:
        """A closing tag within a string of JSON is the string's."""
        self._value += text
        while (at := self._value.find(self._tags.close, self._from)) >= 0:
            if not self._within_string(at):
                if self._passed >= 0 and not is_json(self._value[:at]):
                    at = self._passed
                return self._end_value(at)
            self._passed = at if self._passed < 0 else self._passed
            self._from = self._within = at + 1
        self._from = max(self._from, len(self._value) - len(self._tags.close) + 1)
        return "", ""

    def _within_string(self, at: int) -> bool:
        if self._passed >= 0 and STRING.fullmatch(self._value, self._within, at):
            return True
        return self._value.lstrip()[:1] in ("[", "{") and within_string(self._value[:at])

    def _end_value(self, at: int) -> tuple[str, str]:
        value, rest = self._value[:at].removesuffix(self._newline), self._value[at + len(self._tags.close) :]
        found = to_json(value, self._types or frozenset())
        self._types = None
        return found, rest

    def _close(self) -> str:
        return "}" if self._begun else "{}"

    def finish(self) -> str:
        """A value that has not ended stays open, as in a call in JSON."""
        if self._types is None:
            return self._close()
        if self._passed >= 0:  # the string has no end, so that the tag was one
            written, rest = self._end_value(self._passed)
            more, ended = self.feed(rest)
            return written + more + (self.finish() if ended is None else "")
        return quote(self._held)[1:-1] if self._as_text else self._value
