"""Events of one choice as items that come one after the other: a text, thoughts, a tool call. Each begins, grows, ends.

Anthropic calls them content blocks, OpenAI's responses output items.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from .text.events import Event, Reasoning, Text, ToolCallArguments, ToolCallEnd, ToolCallStart, ToolResult

Kind = Literal["text", "reasoning", "call", "tools"]


class Item:
    """One of them, as far as it has come."""

    __slots__ = ("kind", "index", "id", "name", "text", "result")

    def __init__(self, kind: Kind, index: int, id: str = "", name: str = ""):
        self.kind = kind
        self.index = index  # among the choice's items
        self.id = id  # of a call
        self.name = name
        self.text = ""  # a call's arguments
        self.result: ToolResult | None = None  # of a call that was made here


class Change(NamedTuple):
    what: Literal["begin", "grow", "end", "result"]
    item: Item
    text: str = ""  # what it grew by


class Items:
    """All of one choice's."""

    def __init__(self) -> None:
        self.all: list[Item] = []
        self._open: Item | None = None
        self._blank = ""  # white space that becomes a text only if words follow

    def add(self, events: list[Event]) -> list[Change]:
        """What these events change, in their order."""
        changes: list[Change] = []
        for event in events:
            if isinstance(event, Text):
                self._add_text(event.text, changes)
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
        ended, self._open, self._blank = self._open, None, ""
        return [Change("end", ended)] if ended is not None else []

    def _add_text(self, text: str, changes: list[Change]) -> None:
        if self._open is None or self._open.kind != "text":
            text = self._blank + text
            if text.isspace():
                self._blank = text
                return
        self._grow("text", text, changes)

    def _begin(self, item: Item, changes: list[Change]) -> None:
        changes += self.finish()
        self._open = item
        self.all.append(item)
        changes.append(Change("begin", item))

    def _grow(self, kind: Kind, text: str, changes: list[Change]) -> None:
        if self._open is None or self._open.kind != kind:
            self._begin(Item(kind, len(self.all)), changes)
        assert self._open is not None
        self._open.text += text
        changes.append(Change("grow", self._open, text))
