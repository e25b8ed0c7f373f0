"""From the text of one choice to its events: content, reasoning, tool calls, in the order in which they come.

Text comes in segments that may be cut anywhere; the cuts decide only how the events' text is divided. What may still
turn out to be a marker, the beginning of a call or a stop string is held back, and nothing else but newlines before
markers.

Stop strings apply to the content alone: a client that stops at a line's end means a line of the answer. The reasoning
is not searched, or a thinking model's answer would be empty. Tool calls are not either: what is left of a call would be
no JSON. The newlines around both are not shown and not searched. One exception: a stop string that is exactly a marker,
such as </think>, stops at that marker.

Text that spells a marker without being one has MARK in it (spelled.py), which is not passed on.

Reasoning may come more than once. An opening marker behind a quotation mark is one that the model speaks of.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from .control import MARK
from .draft import Draft
from .events import Event, Reasoning, Text, ToolCallArguments, ToolCallEnd, ToolCallStart, ToolResult, add_event
from .input_text import InputText
from .reasoning import ReasoningFormat
from .stop_strings import StopFinder, partial_suffix
from .tool_formats import ToolCallFormat, ToolCallParser, Tools
from .unmarked_call import UnmarkedCall

QUOTES = frozenset("`'\"‘“")  # before a marker: the model speaks of it


def _unmarked(text: str) -> str:
    return text.replace(MARK, "") if MARK in text else text


class Channel:
    """The content or the reasoning: its text without the newlines next to markers and without stop strings.

    Where text goes on behind markers, the newlines between stay in it, so that words do not run together.
    """

    __slots__ = ("blank", "_kind", "_stop", "_lead", "_marked", "_gap")

    def __init__(self, kind: type[Text] | type[Reasoning], stop: StopFinder | None = None, marked: bool = False):
        self.blank = True  # no text so far
        self._kind = kind
        self._stop = stop
        self._lead: str | None = ""  # white space at the beginning or behind a marker, until text comes: then None
        self._marked = marked  # there was a marker
        self._gap = 0  # newlines at the end, which are dropped if a marker comes and no text after it

    @property
    def resting(self) -> bool:
        """At the beginning or behind a marker: no text came since."""
        return self._lead is not None

    def write(self, text: str, events: list[Event]) -> None:
        text = _unmarked(text)
        if self._lead is not None:
            if not text or text.isspace():
                self._lead += text
                return
            text = self._begin(self._lead + text)
        if self._stop is not None:
            text = self._stop.feed(text)
        self._flow(text, events)

    def _begin(self, text: str) -> str:
        self._lead = None
        if self._marked and (self.blank or self._gap):
            text = text.lstrip("\n")
        self.blank = False
        return text

    def _flow(self, text: str, events: list[Event]) -> None:
        body = text.rstrip("\n")
        if body:
            add_event(events, self._kind("\n" * self._gap + body))
            self._gap = 0
        self._gap += len(text) - len(body)

    def mark(self, events: list[Event]) -> None:
        """A marker begins or ends this channel's text here."""
        if self._stop is not None:
            self._flow(self._stop.finish(), events)  # a stop string does not reach over a marker
        self._lead, self._marked = "", True

    def finish(self, events: list[Event]) -> None:
        """No more comes."""
        text = ""
        if self._lead is not None:
            if self._marked:
                return
            text, self._lead = self._lead, None
        if self._stop is not None:
            text = self._stop.feed(text) + self._stop.finish()
        if text := "\n" * self._gap + text:
            add_event(events, self._kind(text))


class OutputParser:
    """The text of one choice. `stopped` is set once nothing more is to be shown."""

    def __init__(
        self,
        stops: Sequence[str] = (),
        keep_stop: bool = False,
        reasoning: ReasoningFormat | None = None,
        thinking: bool = False,
        tool_format: ToolCallFormat | None = None,
        parallel_calls: bool = True,
        tools: Tools | None = None,
        custom: Collection[str] = (),
    ):
        """`thinking`: the prompt has opened the reasoning already. No tool_format leaves tool calls in the text.
        `tools` are those that the model was offered; events of `custom` ones have the input instead of arguments."""
        self.calls = 0
        self.thinking = reasoning is not None and thinking
        self._stop = StopFinder(stops, keep_stop) if stops else None
        self._reasoning = reasoning
        self._format = tool_format
        self._parallel = parallel_calls
        self._tools = tools or {}
        self._custom = custom
        self._input: InputText | None = None  # of the custom tool's call that is being read
        self._call_ended = False  # the one call of parallel_tool_calls=false is complete
        self._plain = reasoning is None and tool_format is None
        self._content = Channel(Text, self._stop)
        self._thoughts = Channel(Reasoning, marked=self.thinking)
        opens = tool_format.opens if tool_format is not None else ()
        self._content_markers = opens
        self._thought_markers: tuple[str, ...] = ()
        if reasoning is not None:
            self._content_markers = (*opens, *reasoning.opens, *reasoning.dropped)
            self._thought_markers = (*opens, *reasoning.markers)
        firsts = {marker[0] for marker in (*self._content_markers, *self._thought_markers)}
        self._firsts = re.compile("|".join(map(re.escape, sorted(firsts))))
        self._held = ""  # may become a marker
        self._last = ""  # the text before what is looked at now, since the last marker
        self._parser: ToolCallParser | None = None  # of the call that is being read
        self._draft: Draft | None = None  # calls within the thoughts
        self._bare = tool_format.bare if tool_format is not None else ""  # what begins a call, as no text came yet
        self._unmarked: UnmarkedCall | None = None  # what the answer begins with, if that may be a call
        if tool_format is not None and tool_format.unmarked and self._tools:
            self._unmarked = UnmarkedCall(self.calls, self._tools)
        self._busy = bool(self._bare or self._unmarked)  # the next text cannot be passed on as it is, whatever it is

    @property
    def stopped(self) -> bool:
        return self._call_ended or (self._stop is not None and self._stop.found is not None)

    @property
    def stop_string(self) -> str | None:
        return self._stop.found if self._stop is not None else None

    def hold_stops(self, off: bool) -> None:
        """Look for no stop string in the text that comes, or look again."""
        if self._stop is not None:
            self._stop.off = off

    def feed(self, text: str, events: list[Event]) -> None:
        """Add the events of one token's text."""
        if self._plain:
            if self._stop is not None:
                text = self._stop.feed(text)
            if text:
                add_event(events, Text(text))
        elif self._busy or self._firsts.search(text):
            self._route(text, events)
            self._bare = self._bare if self._content.blank and not self.calls else ""
            if self.calls or not self._content.blank:
                self._unmarked = None
            waiting = self._unmarked is not None and not self.thinking
            self._busy = bool(self._held or self._parser or self._draft or self._bare or waiting)
        elif text:
            self._last = text
            (self._thoughts if self.thinking else self._content).write(text, events)

    def finish(self, events: list[Event]) -> None:
        """No more text comes: give out what was held back."""
        if self._plain:
            if self._stop is not None and (rest := self._stop.finish()):
                add_event(events, Text(rest))
            return
        if not self.stopped:
            if self._draft is not None:
                self._finish_draft(self._draft, events)
            elif self._parser is not None:
                self._add(self._parser.finish(), events)
            elif self._unmarked is not None and not self.thinking:
                self._add(self._unmarked.finish(), events)
            else:
                self._channel.write(self._held, events)
        self._thoughts.finish(events)
        self._content.finish(events)

    @property
    def _channel(self) -> Channel:
        return self._thoughts if self.thinking else self._content

    def _route(self, text: str, events: list[Event]) -> None:
        text, self._held = self._held + text, ""
        while text and not self.stopped:
            if self._draft is not None:
                rest = self._draft.feed(text)
                if rest is not None:
                    self._thoughts.write(self._draft.text, events)
                    self._draft = None
                text = rest or ""
            elif self._parser is not None:
                found, rest = self._parser.feed(text)
                if rest is not None:
                    self._parser = None
                self._add(found, events)
                text = rest or ""
            else:
                text = self._read_text(text, events)

    def _read_text(self, text: str, events: list[Event]) -> str:
        """Content or reasoning up to the next marker; returns what follows that."""
        channel = self._channel
        if self._unmarked is not None and channel is self._content and channel.blank and not self.calls:
            if not self._unmarked.begun:
                head = text.lstrip()
                channel.write(text[: len(text) - len(head)], events)
                text = head
            begun = self._unmarked.feed(text)
            if begun is None:
                return ""
            self._unmarked, text = None if self._unmarked.begun else self._unmarked, begun
        if self._bare and channel is self._content and channel.blank and (head := text.lstrip())[:1] in self._bare:
            channel.write(text[: len(text) - len(head)], events)
            if head:
                self._parser = self._make_parser("")
            return head
        markers = self._thought_markers if self.thinking else self._content_markers
        found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
        if not found:
            body = text[: len(text) - partial_suffix(text, markers)]
            self._held = text[len(body) :]
            self._last = body or self._last
            channel.write(body, events)
            return ""
        at, marker = min(found, key=lambda one: (one[0], -len(one[1])))
        before, rest = text[:at], text[at + len(marker) :]
        if self._is_text(marker, before):
            self._last = marker
            channel.write(before + marker, events)
            return rest
        channel.write(before, events)
        if not self.stopped:
            self._last = ""
            self._meet(marker, events)
        return rest

    def _is_text(self, marker: str, before: str) -> bool:
        """Whether a marker is only spoken of, or is a stop string, which the content's channel finds by itself."""
        if not self.thinking and self._stop is not None and marker in self._stop.stops:
            return True
        if self._reasoning is None or marker not in self._reasoning.opens:
            return False
        if self._reasoning.first and not (self._content.blank and not before.strip()):
            return True
        if self.thinking:  # models begin with the marker that the prompt ends with
            return not self._thoughts.resting or bool(before.strip())
        return (before or self._last)[-1:] in QUOTES

    def _meet(self, marker: str, events: list[Event]) -> None:
        """Change the state."""
        reasoning = self._reasoning
        if reasoning is None or marker not in reasoning.markers:
            if reasoning is not None and self.thinking:
                stops = self._stop.stops if self._stop is not None else ()
                assert self._format is not None
                self._draft = Draft(self._format, self._tools, marker, self.calls, reasoning.closes, stops)
            else:
                self._parser = self._make_parser(marker)
        elif self.thinking and self._stop is not None and marker in self._stop.stops:
            self._stop.found = marker
            if self._stop.keep:
                self._thoughts.write(marker, events)
            self._thoughts.mark(events)
        else:
            self._switch(marker in reasoning.opens, events)

    def _make_parser(self, marker: str) -> ToolCallParser:
        assert self._format is not None
        return self._format.parser(marker, self.calls, self._tools)

    def _switch(self, thinking: bool, events: list[Event]) -> None:
        self._thoughts.mark(events)
        self._content.mark(events)
        self.thinking = thinking

    def _add(self, found: list[Event], events: list[Event]) -> None:
        """Events of a call parser."""
        for event in found:
            if isinstance(event, Text | Reasoning):
                self._content.write(event.text, events)
            elif not isinstance(event, ToolResult) and (self._parallel or event.index == 0):
                if isinstance(event, ToolCallArguments):
                    event.text = _unmarked(event.text)
                    if self._input is not None:
                        event.text = self._input.feed(event.text)
                        if not event.text:
                            continue
                if isinstance(event, ToolCallStart):
                    self.calls += 1
                    event.name = _unmarked(event.name)
                    self._content.mark(events)
                    self._input = InputText() if event.name in self._custom else None
                if isinstance(event, ToolCallEnd) and self._input is not None and (rest := self._input.finish()):
                    add_event(events, ToolCallArguments(event.index, rest))
                add_event(events, event)
                if isinstance(event, ToolCallEnd) and not self._parallel:
                    self._call_ended = True
                    return

    def _finish_draft(self, draft: Draft, events: list[Event]) -> None:
        found = draft.finish()
        if found:
            self._switch(False, events)
            self._add(found, events)
        else:
            self._thoughts.write(draft.text, events)
