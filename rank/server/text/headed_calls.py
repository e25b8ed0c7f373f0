"""Reads calls that each begin with a head, which names the function, and go on with its arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Protocol

from .events import Event, Text, ToolCallArguments, ToolCallEnd, ToolCallStart
from .heads import Head
from .json_calls import JsonValue
from .tool_formats import call_id


class ArgumentsReader(Protocol):
    """Reads a call's arguments, in whatever way they are written, as JSON."""

    def feed(self, text: str) -> tuple[str, str | None]:
        """More of the JSON, and what follows the arguments once they have ended."""

    def finish(self) -> str:
        """No more text comes: the rest of the JSON, as far as it is known."""


class JsonArguments:
    """Arguments that are JSON already. One of `ends` outside a string ends them where a bracket is missing."""

    def __init__(self, ends: tuple[str, ...] = ()):
        self._ends = ends
        self._value = JsonValue("".join({end[0] for end in ends}))
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        text, self._held = self._held + text, ""
        at = 0
        while True:
            at = self._value.feed(text, at)
            if self._value.done or text.startswith(self._ends, at):
                return text[:at], text[at:]
            tail = text[at:]
            if any(end.startswith(tail) for end in self._ends):
                self._held = tail
                return text[:at], None
            if not tail:
                return text, None
            at += 1

    def finish(self) -> str:
        return self._held


class HeadedCalls:
    """One call or several, until something comes that is no part of them."""

    def __init__(
        self,
        marker: str,
        index: int,
        head: Head,
        arguments: Callable[[str], ArgumentsReader],
        *,
        close: tuple[str, ...] = (),
        between: tuple[str, ...] = (),
        prefix: str = "",
        one: bool = False,
        known: Collection[str] = (),
        make_id: Callable[[re.Match[str]], str] = lambda head: call_id(),
    ):
        """`marker` was read already, and is followed by a head; where it belongs to the head it is its `prefix` too.

        head: its group `name` is the function's, and what follows the match is the arguments.
        arguments: makes their reader, of the function's name.
        close: any of these ends the calls. between: these may stand behind a call and have no meaning.
        one: another marker begins the next call. known: only these functions are called, if there are any.
        """
        self._marker = marker
        self._index = index
        self._head = head
        self._arguments = arguments
        self._close = close
        self._between = between
        self._prefix = prefix
        self._one = one
        self._known = known
        self._make_id = make_id
        self._held = ""
        self._reader: ArgumentsReader | None = None
        self._called = False

    def feed(self, text: str) -> tuple[list[Event], str | None]:
        events: list[Event] = []
        text, self._held = self._held + text, ""
        while text:
            if self._reader is not None:
                fragment, rest = self._reader.feed(text)
                self._pass(fragment, events)
                if rest is None:
                    return events, None
                self._reader, text = None, rest
                events.append(ToolCallEnd(self._index))
                self._index += 1
            elif self._called and (found := self._behind(text)) is not None:
                text, ended = found
                if ended:
                    return events, text
                if self._held:
                    return events, None
            elif not self._called or not self._one:
                head = self._head.match(self._prefix + text)
                if head is None:
                    if self._head.may_come(self._prefix + text):
                        self._held = text
                        return events, None
                    return self._give_up(text, events)
                if self._known and head["name"] not in self._known:
                    return self._give_up(text, events)
                text = text[head.end() - len(self._prefix) :]
                self._begin(head, events)
            else:
                return events, text
        return events, None

    def _behind(self, text: str) -> tuple[str, bool] | None:
        """The text behind a call: (the rest, whether the calls have ended); None where it may be another call."""
        body = text.lstrip()
        for end in self._close:
            if body.startswith(end):
                return body[len(end) :], True
        for mark in self._between:
            if body.startswith(mark):
                return body[len(mark) :], False
        if any(mark.startswith(body) for mark in (*self._close, *self._between)):
            self._held = text
            return "", False
        return None

    def _begin(self, head: re.Match[str], events: list[Event]) -> None:
        name = head["name"]
        events.append(ToolCallStart(self._index, self._make_id(head), name))
        self._reader = self._arguments(name)
        self._called, self._prefix = True, ""

    def _pass(self, fragment: str, events: list[Event]) -> None:
        if fragment:
            events.append(ToolCallArguments(self._index, fragment))

    def _give_up(self, text: str, events: list[Event]) -> tuple[list[Event], str]:
        """This is no call."""
        if not self._called:
            # Without a marker the first character has shown that it might be one.
            first = self._marker or text[:1]
            events.append(Text(first))
            text = text[len(first) - len(self._marker) :]
        return events, text

    def finish(self) -> list[Event]:
        if self._reader is not None:
            events: list[Event] = []
            self._pass(self._reader.finish(), events)
            return [*events, ToolCallEnd(self._index)]
        text = self._held if self._called else self._marker + self._held
        return [Text(text)] if text.strip() else []
