"""Tool calls within a model's thoughts.

Models forget to close their thoughts before they call. They also draft calls in their thoughts, and speak of how
calls are written; such a call must not be made, least of all together with the real one. The end distinguishes them: a
model ends its turn with its calls. So calls in thoughts count if nothing follows them, or nothing but the end of the
thoughts, and they are held back until that is known.
"""

from __future__ import annotations

from collections.abc import Sequence

from .events import Event, Text, ToolCallEnd, ToolCallStart, add_event
from .stop_strings import partial_suffix
from .tool_formats import ToolCallFormat, ToolCallParser, Tools


class Draft:
    """Text that may be the calls at the end of an output, from the first marker on."""

    def __init__(
        self,
        tool_format: ToolCallFormat,
        tools: Tools,
        marker: str,
        index: int,
        closes: tuple[str, ...],
        stops: Sequence[str],
    ):
        """`closes` are the markers that end the thoughts; before one of them, everything is a thought. One that is a
        stop string ends the output."""
        self.text = marker  # all of it, should it be a thought
        self._format = tool_format
        self._tools = tools
        self._calls = index  # so far, with those before
        self._closes = closes
        self._close = ""  # the one that came
        self._stops = stops
        self._events: list[Event] = []
        self._held = ""  # may become a marker
        self._closed = ""  # the end of the thoughts and the white space behind it
        self._parser: ToolCallParser | None = tool_format.parser(marker, index, tools)

    def feed(self, text: str) -> str | None:
        """None as long as these may be calls. Else `text` is a thought, and what follows it is returned."""
        if self._closed:
            return self._wait(text)
        text, self._held = self._held + text, ""
        at, self._close = min(
            ((at, close) for close in self._closes if (at := text.find(close)) >= 0), default=(-1, "")
        )
        end = at if at >= 0 else len(text) - partial_suffix(text, self._closes)
        rest = self._read(text[:end])
        if rest is None and at < 0:
            self._held += text[end:]
            return None
        if rest is None and self._complete():
            return self._wait(text[at:])
        return (self._held if rest is None else rest) + text[end:]

    def _complete(self) -> bool:
        ended = bool(self._events) and isinstance(self._events[-1], ToolCallEnd) and not self._held.strip()
        return ended and self._close not in self._stops

    def _wait(self, text: str) -> str | None:
        """The thoughts have ended behind the calls: what comes now makes them drafts."""
        self._closed += text
        return self._closed if self._closed.removeprefix(self._close).strip() else None

    def _read(self, text: str) -> str | None:
        while text:
            if self._parser is not None:
                found, rest = self._parser.feed(text)
                self.text += text
                for event in found:
                    add_event(self._events, event)
                    self._calls += isinstance(event, ToolCallStart)
                if rest is None:
                    return None
                self._parser, text = None, rest
                self.text = self.text[: len(self.text) - len(rest)]
                if any(isinstance(event, Text) for event in found):
                    return rest
                continue
            head = text.lstrip()
            marker = next((marker for marker in self._format.opens if head.startswith(marker)), "")
            if head and not marker:
                if not any(marker.startswith(head) for marker in self._format.opens):
                    return text
                self._held = text
                return None
            self.text += text[: len(text) - len(head)] + marker
            text = head[len(marker) :]
            if marker:
                self._parser = self._format.parser(marker, self._calls, self._tools)
        return None

    def finish(self) -> list[Event]:
        """No more text comes: the events of the calls. Where there are none, `text` is a thought."""
        events, held = self._events, self._held
        if self._parser is not None:
            found, rest = self._parser.feed(held)
            events = [*events, *found, *(self._parser.finish() if rest is None else ())]
            held = rest or ""
        if not any(isinstance(event, ToolCallStart) for event in events):
            self.text += self._held
            return []
        return [*events, Text(held)] if held.strip() else events
