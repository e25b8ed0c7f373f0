"""Reads {"name": …, "arguments": {…}} objects out of text that is still being written."""

from __future__ import annotations

import json

NAMES = ("name", "function")
ARGUMENTS = ("arguments", "parameters")


class JsonCalls:
    """One or more call objects, bare, in a list, or separated by anything.

    The arguments are passed on as the model writes them. An object without a name is given back by `close`.
    """

    def __init__(self, marker: str = ""):
        self._raw = marker if marker != "{" else ""  # all text that was not recognised as a call, its marker first
        self._rest = ""  # the same, after a call was recognised
        self._called = False
        self._reset()

    def _reset(self) -> None:
        self._text = ""  # of the current object, from its brace on
        self._at = 0  # how much of it has been scanned
        self._depth = 0
        self._string_at = -1  # where the string that is being read began
        self._escaped = False
        self._key: str | None = None  # of the value that is being read, at depth 1
        self._value_at = -1
        self._name: str | None = None
        self._sent = 0  # up to where the arguments are passed on
        self._arguments = ""  # complete, but the name is not known yet
        self._has_arguments = False

    def feed(self, text: str) -> list[tuple[str, str]]:
        events: list[tuple[str, str]] = []
        while text:
            if self._depth == 0:
                start = text.find("{")
                if start < 0:
                    self._keep(text)
                    return events
                self._keep(text[:start])
                self._reset()
                text = text[start:]
            self._text += text
            end = self._scan(events)
            if end < 0:
                self._stream(len(self._text), events)
                return events
            text = self._text[end:]
            self._end_object(self._text[:end], events)
        return events

    def close(self) -> str:
        if self._depth and self._name is None:
            self._keep(self._text)
        if not self._called:
            return self._raw
        return ""  # what stands beside calls is punctuation

    def _keep(self, text: str) -> None:
        if not self._called:
            self._raw += text

    def _scan(self, events: list) -> int:
        """Read on; returns where the object ends, or -1."""
        text = self._text
        for i in range(self._at, len(text)):
            char = text[i]
            if self._string_at >= 0:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._end_string(i + 1)
                continue
            if char in "{[":
                if self._depth == 1 and self._key is not None and self._value_at < 0:
                    self._begin_value(i)
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._end_value(i, events)
                    return i + 1
                if self._depth == 1 and self._key in ARGUMENTS:
                    self._stream(i + 1, events)
            elif char == '"':
                self._string_at = i
                if self._depth == 1 and self._key is not None and self._value_at < 0:
                    self._begin_value(i)
            elif char == "," and self._depth == 1:
                self._end_value(i, events)
            elif self._depth == 1 and self._key is not None and self._value_at < 0 and char not in ": \t\r\n":
                self._begin_value(i)
        self._at = len(text)
        return -1

    def _end_string(self, end: int) -> None:
        start, self._string_at = self._string_at, -1
        if self._depth == 1 and self._key is None:
            self._key = _loads(self._text[start:end])

    def _begin_value(self, at: int) -> None:
        self._value_at = self._sent = at

    def _end_value(self, end: int, events: list) -> None:
        if self._value_at >= 0:
            value = self._text[self._value_at:end].strip()
            if self._key in NAMES and self._name is None:
                name = _loads(value)
                if isinstance(name, str):
                    self._name = name
                    self._called = True
                    events.append(("name", name))
                    if self._arguments:
                        events.append(("arguments", self._arguments))
            elif self._key in ARGUMENTS:
                self._end_arguments(value, events)
        self._key, self._value_at = None, -1

    def _end_arguments(self, value: str, events: list) -> None:
        self._has_arguments = True
        if value.startswith('"'):  # JSON within a string
            inner = _loads(value)
            value = inner if isinstance(inner, str) else value
        elif self._name is not None:
            self._stream(self._value_at + len(value), events)
            return
        if self._name is None:
            self._arguments = value
        else:
            events.append(("arguments", value))

    def _stream(self, end: int, events: list) -> None:
        """Pass on the arguments up to `end`, once the name is known."""
        if (self._key not in ARGUMENTS or self._value_at < 0 or self._name is None or end <= self._sent
                or self._text[self._value_at] == '"'):
            return
        if self._depth == 1:  # after the value only white space may follow
            end = self._sent + len(self._text[self._sent:end].rstrip())
        if end > self._sent:
            events.append(("arguments", self._text[self._sent:end]))
            self._sent = end

    def _end_object(self, text: str, events: list) -> None:
        if self._name is None:
            self._keep(text)
        elif not self._has_arguments:
            events.append(("arguments", "{}"))
        self._reset()


def _loads(text: str):
    try:
        return json.loads(text)
    except ValueError:
        return None
