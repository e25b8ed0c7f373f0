"""Reads {"name": …, "arguments": {…}} objects out of text that is still being written; several formats use this."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Collection

from .events import Event, Text, ToolCallArguments, ToolCallEnd, ToolCallStart, add_event
from .tool_formats import call_id

NAMES = ("name", "function")
ARGUMENTS = ("arguments", "parameters")
SPACE = " \t\r\n"
STRING_END = re.compile(r'["\\]')
LITERAL_END = re.compile(r"[^\w.+-]")


class JsonValue:
    """Follows an object or a list from its first bracket to the one that closes it, wherever the text is cut.

    Only brackets and strings are looked at: what else is wrong is the client's to see.
    """

    __slots__ = ("done", "in_string", "_depth", "_escaped", "_structure")

    def __init__(self, watch: str):
        self.done = False
        self.in_string = False
        self._depth = 0
        self._escaped = False
        self._structure = _structure(watch)

    def feed(self, text: str, at: int) -> int:
        """Read on from `at`; returns where the value ends, or a `watch` character outside strings, or the text."""
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (STRING_END if self.in_string else self._structure).search(text, at)
            if found is None:
                return len(text)
            at, char = found.start(), found[0]
            if self.in_string:
                self.in_string = char != '"'
                self._escaped = char == "\\"
            elif char == '"':
                self.in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.done = True
                    return at + 1
            else:
                return at
            at += 1
        return at


@functools.cache
def _structure(watch: str) -> re.Pattern[str]:
    return re.compile(f'["{{}}[\\]{re.escape(watch)}]')


class JsonCalls:
    """One or more call objects, bare, in a list, or with punctuation between them.

    A call begins once its name and the beginning of its arguments are known. After a marker an object with a name
    alone is a call too. Until then everything is kept, and what proves to be no call is given back as text.
    """

    def __init__(
        self,
        marker: str,
        index: int,
        close: str = "",
        others: tuple[str, ...] = (),
        make_id: Callable[[], str] = call_id,
        known: Collection[str] = (),
    ):
        """`marker` was read already; without one an object needs arguments to be a call.

        `close` ends the calls, `others` do so too and are left in the text. Both begin with characters that JSON does
        not have outside strings, so that they are found where a model forgets a bracket. Only `known` functions are
        called, if there are any.
        """
        self._index = index
        self._bare = not marker
        self._close = close
        self._ends = (close, *others) if close else others
        self._watch = "".join({end[0] for end in self._ends})
        self._make_id = make_id
        self._known = known
        self._events: list[Event] = []
        self._kept = marker  # what is text again if no call comes of it
        self._keep_from = 0  # the same of the text at hand begins here
        self._held = ""  # the beginning of an end marker, perhaps
        self._rest: str | None = None
        self._in_list = False
        self._read: Callable[[str, int], int] = self._before
        self._begin_object()

    def _begin_object(self) -> None:
        self._started = False  # its start was told
        self._name = ""
        self._key: str | None = None
        self._has_arguments = False
        self._arguments = ""  # what came before the name
        self._passing = False  # the value that is being read is the arguments
        self._quoted = ""  # of the string or literal that is being read
        self._escaped = False
        self._value = JsonValue(self._watch)

    def feed(self, text: str) -> tuple[list[Event], str | None]:
        text, self._held = self._held + text, ""
        self._events, self._keep_from, at = [], 0, 0
        while at < len(text) and self._rest is None:
            if text[at] in self._watch and not self._in_string():
                end = next((end for end in self._ends if text.startswith(end, at)), "")
                if end:
                    self._end_by(end, text, at)
                    break
                if any(end.startswith(text[at:]) for end in self._ends):
                    text, self._held = text[:at], text[at:]
                    break
            at = self._read(text, at)
        if not self._started:
            self._kept += text[self._keep_from :]
        return self._events, self._rest

    def finish(self) -> list[Event]:
        self._events = []
        if self._started:
            if self._passing:
                self._pass(self._held)
            self._end_call()
        elif self._read != self._after:  # what stands beside calls is punctuation
            self._events.append(Text(self._kept + self._held))
        return self._events

    def _in_string(self) -> bool:
        return self._read == self._string or (self._read == self._nested and self._value.in_string)

    # Outcomes.

    def _end_by(self, end: str, text: str, at: int) -> None:
        if self._started:
            self._end_call()
        elif self._read != self._after:
            self._give_up(text, at)
            return
        self._rest = text[at + len(end) :] if end == self._close else text[at:]

    def _give_up(self, text: str, at: int) -> int:
        """This is no call, as the character at `at` shows."""
        self._events.append(Text(self._kept + text[self._keep_from : at]))
        self._rest = text[at:]
        return at

    def _broken(self, text: str, at: int) -> int:
        """No JSON from here on; a call that has begun stays one."""
        if not self._started:
            return self._give_up(text, at)
        self._end_call()
        return self._end_object(at)

    def _start_call(self) -> None:
        self._started = True
        self._events.append(ToolCallStart(self._index, self._make_id(), self._name))
        self._pass(self._arguments)

    def _pass(self, arguments: str) -> None:
        if not self._started:
            self._arguments += arguments
        elif arguments:
            add_event(self._events, ToolCallArguments(self._index, arguments))

    def _end_call(self) -> None:
        self._end_scalar()
        self._events.append(ToolCallEnd(self._index))
        self._index += 1

    def _end_object(self, at: int) -> int:
        self._begin_object()
        self._kept, self._keep_from = "", at
        self._read = self._after
        return at

    # States of reading. Each takes the text and a position in it and returns the position from which to go on.

    def _before(self, text: str, at: int) -> int:
        char = text[at]
        if char == "{":
            self._read = self._keys
        elif char == "[" and not self._in_list:
            self._in_list = True
        elif char not in SPACE:
            return self._give_up(text, at)
        return at + 1

    def _after(self, text: str, at: int) -> int:
        char = text[at]
        if char == "{":
            self._read = self._keys
        elif char == "]" and self._in_list:
            self._in_list = False
            self._kept, self._keep_from = "", at + 1
        elif char not in SPACE + ",;}":
            self._rest = self._kept + text[self._keep_from :]
            return at
        return at + 1

    def _keys(self, text: str, at: int) -> int:
        char = text[at]
        if char == '"':
            self._key, self._read = None, self._string
        elif char == "}":
            return self._close_object(text, at)
        elif char not in SPACE + ",":
            return self._broken(text, at)
        return at + 1

    def _close_object(self, text: str, at: int) -> int:
        if not self._started and self._name and not self._bare:
            self._arguments = "{}"
            self._start_call()
        if not self._started:
            return self._give_up(text, at + 1)
        self._end_call()
        return self._end_object(at + 1)

    def _colon(self, text: str, at: int) -> int:
        char = text[at]
        if char == ":":
            self._read = self._begin_value
        elif char not in SPACE:
            return self._broken(text, at)
        return at + 1

    def _begin_value(self, text: str, at: int) -> int:
        char = text[at]
        if char in SPACE:
            return at + 1
        if char in ",:}]":
            return self._broken(text, at)
        if self._key in ARGUMENTS and not self._has_arguments:
            self._has_arguments = self._passing = True
            if self._name:
                self._start_call()
        if char in "{[":
            self._read = self._nested
            return at
        self._read = self._string if char == '"' else self._literal
        return at + 1 if char == '"' else at

    def _nested(self, text: str, at: int) -> int:
        # A watched character that is no end marker is the value's.
        skip = text[at] in self._watch and not self._value.in_string
        end = self._value.feed(text, at + skip)
        if self._passing:
            self._pass(text[at:end])
        if self._value.done:
            self._value = JsonValue(self._watch)
            self._end_value()
        return end

    def _string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            self._quoted += text[at]
            return at + 1
        found = STRING_END.search(text, at)
        end = found.start() if found else len(text)
        self._quoted += text[at:end]
        if found is None:
            return end
        if found[0] == "\\":
            self._escaped = True
            self._quoted += "\\"
        elif self._key is None:
            self._key, self._quoted, self._read = _unquote(self._quoted), "", self._colon
        else:
            if self._key in NAMES and not self._name:
                self._name = _unquote(self._quoted)
                if self._known and self._name not in self._known:
                    return self._give_up(text, end + 1)
            self._end_scalar()
        return end + 1

    def _literal(self, text: str, at: int) -> int:
        found = LITERAL_END.search(text, at)
        end = found.start() if found else len(text)
        self._quoted += text[at:end]
        if found:
            self._end_scalar()
        return end

    def _end_scalar(self) -> None:
        """The arguments may be JSON within a string, or nothing."""
        if self._read not in (self._string, self._literal):
            return
        if self._passing:
            value = _unquote(self._quoted)
            self._pass("{}" if value in ("", "null") else value)
        self._quoted = ""
        self._end_value()

    def _end_value(self) -> None:
        self._passing = False
        self._read = self._comma

    def _comma(self, text: str, at: int) -> int:
        char = text[at]
        if char in SPACE:
            return at + 1
        if char not in ",}":
            return self._broken(text, at)
        if self._name and self._has_arguments and not self._started:
            self._start_call()
        if char == "}":
            return self._close_object(text, at)
        self._read = self._keys
        return at + 1


def _unquote(text: str) -> str:
    """The value of a JSON string; the text itself where it is no JSON string."""
    try:
        return json.loads(f'"{text}"', strict=False)
    except ValueError:
        return text
