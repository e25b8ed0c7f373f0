"""Parts of an answer: an ordered stream of typed events for each choice, and the same put together."""

from __future__ import annotations

import msgspec

from ... import protocol


class Text(msgspec.Struct, gc=False):
    """More of the answer's text, its content."""

    text: str
    logprobs: list[protocol.TokenLogprob] | None = None  # of its tokens, where they are wanted


class Reasoning(msgspec.Struct, gc=False):
    """More of the model's thoughts."""

    text: str


class ToolCallStart(msgspec.Struct, gc=False):
    """The model calls a function. Calls of a choice count from 0 and come one after the other."""

    index: int
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, gc=False):
    """More of the JSON of a call's arguments, as the model writes it."""

    index: int
    text: str


class ToolCallEnd(msgspec.Struct, gc=False):
    """The call's arguments are complete, or the model's output has ended within them."""

    index: int


class ToolResult(msgspec.Struct, gc=False):
    """The result of a call made here, by a tool server."""

    id: str  # the call's
    text: str
    failed: bool = False


Event = Text | Reasoning | ToolCallStart | ToolCallArguments | ToolCallEnd | ToolResult


def add_event(events: list[Event], event: Event) -> None:
    """Append an event; text that goes on becomes part of the last one."""
    if events:
        last = events[-1]
        if isinstance(event, Text) and isinstance(last, Text):
            last.text += event.text
            if event.logprobs:
                last.logprobs = [*(last.logprobs or ()), *event.logprobs]
            return
        if isinstance(event, Reasoning) and isinstance(last, Reasoning):
            last.text += event.text
            return
        if isinstance(event, ToolCallArguments) and isinstance(last, ToolCallArguments) and event.index == last.index:
            last.text += event.text
            return
    events.append(event)


class ToolCall(msgspec.Struct):
    """A whole call."""

    id: str
    name: str
    arguments: str = ""


class Answer:
    """The events of one choice put together; the order of text and calls is lost."""

    __slots__ = ("_text", "_reasoning", "calls")

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self.calls: list[ToolCall] = []

    def add(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Text):
                self._text.append(event.text)
            elif isinstance(event, Reasoning):
                self._reasoning.append(event.text)
            elif isinstance(event, ToolCallStart):
                self.calls.append(ToolCall(event.id, event.name))
            elif isinstance(event, ToolCallArguments):
                self.calls[event.index].arguments += event.text

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)
