"""Events of one choice as items that come one after the other: a text, thoughts, a tool call. Each begins, grows, ends.

Anthropic calls them content blocks, OpenAI's responses output items.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from ..protocol import TokenLogprob
from .text.events import Event, Reasoning, Text, ToolCallArguments, ToolCallEnd, ToolCallStart, ToolResult

Kind = Literal["text", "reasoning", "call", "tools"]


class Item:
    """One of them, as far as it has come."""

    __slots__ = ("kind", "index", "id", "name", "text", "logprobs", "result")

    def __init__(self, kind: Kind, index: int, id: str = "", name: str = ""):
        self.kind = kind
        self.index = index  # among the choice's items
        self.id = id  # of a call
        self.name = name
        self.text = ""  # a call's arguments
        self.logprobs: list[TokenLogprob] = []  # of a text's tokens, where they are wanted
        self.result: ToolResult | None = None  # of a call that was made here


class Change(NamedTuple):
    what: Literal["begin", "grow", "end", "result"]
    item: Item
    text: str = ""  # what it grew by
    logprobs: list[TokenLogprob] | None = None  # of the tokens of this text


class Items:
    """All of one choice's."""

    def __init__(self) -> None:
        self.all: list[Item] = []
        self._open: Item | None = None
        self._blank = Text("")  # white space that becomes a text only if words follow

    def add(self, events: list[Event]) -> list[Change]:
        """The changes that these events make, in their order."""
        changes: list[Change] = []
        for event in events:
            if isinstance(event, Text):
                self._add_text(event, changes)
            elif isinstance(event, Reasoning):
                self._grow("reasoning", event.text, changes)
            elif isinstance(event, ToolCallStart):
                self._begin(Item("call", len(self.all), event.id, event.name), changes)
            elif isinstance(event, ToolCallArguments):
                self._grow("call", event.text, changes)
            elif isinstance(event, ToolCallEnd):
                changes += self.finish()
            elif isinstance(event, ToolResult):
                changes += self.finish()
                called = next(item for item in reversed(self.all) if item.kind == "call" and item.id == event.id)
                called.result = event
                changes.append(Change("result", called))
        return changes

    def add_tools(self, label: str) -> Item:
        """The list of a tool server's tools; it is whole at once."""
        item = Item("tools", len(self.all), name=label)
        self.all.append(item)
        return item

    def finish(self) -> list[Change]:
        """The open item ends."""
        ended, self._open, self._blank = self._open, None, Text("")
        return [Change("end", ended)] if ended is not None else []

    def _add_text(self, event: Text, changes: list[Change]) -> None:
        text, logprobs = event.text, event.logprobs
        if self._open is None or self._open.kind != "text":
            text = self._blank.text + text
            if self._blank.logprobs:
                logprobs = [*self._blank.logprobs, *(logprobs or ())]
            if text.isspace():
                self._blank = Text(text, logprobs)
                return
        self._grow("text", text, changes, logprobs)

    def _begin(self, item: Item, changes: list[Change]) -> None:
        changes += self.finish()
        self._open = item
        self.all.append(item)
        changes.append(Change("begin", item))

    def _grow(self, kind: Kind, text: str, changes: list[Change], logprobs: list[TokenLogprob] | None = None) -> None:
        if self._open is None or self._open.kind != kind:
            self._begin(Item(kind, len(self.all)), changes)
        assert self._open is not None
        self._open.text += text
        self._open.logprobs += logprobs or ()
        changes.append(Change("grow", self._open, text, logprobs))
