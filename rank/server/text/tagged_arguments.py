"""Arguments between tags, as models with XML-like calls write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from .argument_schema import Parameters
from .heads import Head
from .schema_values import TYPES, is_json, quote, to_json, within_string
from .stop_strings import partial_suffix

STRING = re.compile(r'(?:[^"\\\x00-\x1f]|\\.)*')  # more of a string of JSON, without its end


LONGEST_GAP = 64  # characters of white space between two markers


class Tags(NamedTuple):
    """How a format writes arguments."""

    head: Head  # before a value; group 1 is the argument's name, and "text", if it is there, "true" for a text
    close: str  # behind a value
    # Any of these ends the arguments; those in `kept`, and the marker of another call, are left in the text.
    end: tuple[str, ...]
    kept: tuple[str, ...] = ()
    again: str = ""
    lines: bool = False  # a value stands on lines of its own: the newlines around it are not part of it
    # Markers that a model writes before and behind an argument's name.
    before: str = ""
    behind: str = ""
    behind_json: str = ""  # in its place where a value cannot be a text
    # A value without its closing tag ends at one of `end` only if the text ends there, too, or goes on with one of
    # these: otherwise a text speaks of how calls are written. (): those of `end` are tokens, which no text has.
    after_end: tuple[str, ...] = ()

    @property
    def forbidden(self) -> tuple[str, ...]:
        """The markers that no text of a grammar has in it, as a value may end there."""
        return (self.close, *self.end, *self.kept, self.before)


class ValueEnd(NamedTuple):
    """The place where a value ends, in the text that is at hand."""

    end: int
    mark: int  # the marker behind it
    rest: int  # what follows it


class TaggedArguments:
    """Reads them as JSON. A text is passed on as it comes, other values when they are complete.

    A schema's types decide what a value is: `5` is a text where the schema asks for one. A value whose closing tag a
    model forgets ends at the next argument's head, or where the call or all calls end.
    """

    def __init__(self, tags: Tags, schema: Mapping[str, Any]):
        self._tags = tags
        self._parameters = Parameters(schema)
        self._ends = tuple(filter(None, (*tags.end, *tags.kept, tags.again)))
        self._head = tags.before.rstrip('"')  # what each head begins with
        self._marks = (tags.close, *tags.end, *tags.kept, self._head)
        self._mark = re.compile("|".join(map(re.escape, sorted(self._marks, key=len, reverse=True))))
        self._begun = False  # the opening brace was written
        self._held = ""
        self._names: set[str] = set()  # of the arguments so far
        self._types: frozenset[str] | None = None  # of the value that is being read; None: between values
        self._first = False  # nothing of the value came yet
        self._value = ""  # of no text: what came so far
        self._from = 0  # where an end of it is looked for
        self._passed: ValueEnd | None = None  # the first end that seemed to stand in a string
        self._within = 0  # behind the last such

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
            end = next((one for one in self._ends if body.startswith(one)), "")
            if end:
                return written + self._close(), body[len(end) :] if end in self._tags.end else body
            if not body or any(one.startswith(body) for one in self._ends):
                self._held = text
                break
            head = self._tags.head.match(body)
            if head is None:
                if self._tags.head.may_come(body):
                    self._held = text
                    break
                return written + self._close(), text
            written += self._begin(head[1], head.groupdict().get("text") == "true")
            text = body[head.end() :]
        return written, None

    def _begin(self, name: str, text: bool) -> str:
        self._types, self._value, self._first = self._parameters.types(name), "", True
        if text and self._types >= frozenset(TYPES):  # the schema leaves it open
            self._types = frozenset({"string"})
        self._from, self._passed = 0, None
        self._names.add(name)
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

    def _find_end(self, text: str, start: int, last: bool = False) -> ValueEnd | int:
        """The end of a value; or how far the text is the value's for certain.

        last: no more text comes.
        """
        while (found := self._mark.search(text, start)) is not None:
            at = found.start()
            line = at - text.endswith("\n", start, at)
            if found[0] == self._tags.close:
                return ValueEnd(line if self._tags.lines else at, at, found.end())
            ends = self._ends_value(text, found, last)
            if ends:
                return ValueEnd(line, at, at)
            if ends is None:
                return line
            start = at + 1
        size = partial_suffix(text[start:], self._marks)
        return len(text) - size - text.endswith("\n", start, len(text) - size)

    def _ends_value(self, text: str, mark: re.Match[str], last: bool) -> bool | None:
        """Whether a marker that is not the value's own ends it; None where more text has to come."""
        tags = self._tags
        if mark[0] in tags.kept:
            return True
        if mark[0] == self._head:
            head = tags.head.match(text[mark.start() :])
            if head is None:
                return None if not last and tags.head.may_come(text[mark.start() :]) else False
            names = self._parameters.names
            return head[1] not in self._names and (not names or head[1] in names)
        if not tags.after_end:
            return True
        behind = text[mark.end() :].lstrip()
        if behind.startswith(tags.after_end):
            return True
        gap = len(text) - mark.end() - len(behind)
        if gap > LONGEST_GAP or not any(one.startswith(behind) for one in tags.after_end):
            return False
        return True if last and not behind else False if last else None

    def _read_text(self, text: str, last: bool = False) -> tuple[str, str]:
        found = self._find_end(text, 0, last)
        if isinstance(found, int):
            self._held = text[found:]
            return quote(text[:found])[1:-1], ""
        self._types = None
        return quote(text[: found.end])[1:], text[found.rest :]

    def _read_other(self, text: str, last: bool = False) -> tuple[str, str]:
        """A marker within a string of JSON is the string's."""
        self._value += text
        while not isinstance(found := self._find_end(self._value, self._from, last), int):
            if not self._within_string(found.mark):
                if self._passed is not None and not is_json(self._value[: found.mark]):
                    found = self._passed
                return self._end_value(found)
            self._passed = self._passed or found
            self._from = self._within = found.mark + 1
        self._from = max(self._from, found)
        return "", ""

    def _within_string(self, at: int) -> bool:
        if self._passed is not None and STRING.fullmatch(self._value, self._within, at):
            return True
        return self._value.lstrip()[:1] in ("[", "{") and within_string(self._value[:at])

    def _end_value(self, at: ValueEnd) -> tuple[str, str]:
        found = to_json(self._value[: at.end], self._types or frozenset())
        self._types = None
        return found, self._value[at.rest :]

    def _close(self) -> str:
        return "}" if self._begun else "{}"

    def finish(self) -> str:
        """A value that has not ended stays open, as in a call in JSON."""
        if self._types is None:
            return self._close()
        if self._as_text:
            held, self._held = self._held, ""
            written, rest = self._read_text(held, last=True)
        else:
            written, rest = self._read_other("", last=True)
            if self._types is not None and self._passed is not None:  # the string has no end: the marker was one
                written, rest = self._end_value(self._passed)
        if self._types is not None:
            return written + (quote(self._held)[1:-1] if self._as_text else self._value)
        more, ended = self.feed(rest)
        return written + more + (self.finish() if ended is None else "")
