"""One stream machine for text: stop strings, then reasoning, tool calls and content.

Text comes in pieces that may be cut anywhere, and the outcome does not depend on where. Only what may still turn out
to be the start of a stop string or a marker is held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .tools import CallParser, Syntax

START, CONTENT, REASONING, TOOL = "start", "content", "reasoning", "tool"


class Reasoning(NamedTuple):
    """The markers around a model's thoughts."""

    open: str
    close: str


KNOWN_REASONING = (Reasoning("<think>", "</think>"), Reasoning("[THINK]", "[/THINK]"),
                   Reasoning("<thought>", "</thought>"))


class Output:
    """What the machine adds to each channel."""

    __slots__ = ("content", "reasoning", "calls")

    def __init__(self) -> None:
        self.content = ""
        self.reasoning = ""
        self.calls: list[dict] = []  # OpenAI's tool_calls deltas


def partial_suffix(text: str, words: Sequence[str]) -> int:
    """The length of the longest end of `text` with which one of `words` begins, the whole word excluded."""
    longest = 0
    for word in words:
        start = max(len(text) - len(word) + 1, 0)
        while (start := text.find(word[0], start)) >= 0:
            if word.startswith(text[start:]):
                longest = max(longest, len(text) - start)
                break
            start += 1
    return longest


class StopFinder:
    """Finds the stop string that is complete first; of two that end together, the longer."""

    __slots__ = ("found", "_stops", "_keep", "_held")

    def __init__(self, stops: Sequence[str], keep: bool):
        self.found: str | None = None
        self._stops = stops
        self._keep = keep  # the stop string itself is shown
        self._held = ""

    def feed(self, text: str) -> str:
        """The text that is certainly before any stop string."""
        text = self._held + text
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        if best is not None:
            end, start, self.found = best
            self._held = ""
            return text[: end if self._keep else start]
        held = partial_suffix(text, self._stops)
        self._held = text[len(text) - held:]
        return text[: len(text) - held]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


class Machine:
    """The text of one choice. `stopped` is set once nothing more is to be shown."""

    def __init__(self, stops: Sequence[str] = (), keep_stop: bool = False, reasoning: Reasoning | None = None,
                 thinking: bool = False, syntax: Syntax | None = None, parallel_calls: bool = True):
        """`thinking`: the prompt has opened the reasoning already. `syntax`: None leaves tool calls in the text."""
        self.calls = 0
        self.call_ended = False  # the one call of parallel_tool_calls=false is complete
        self._stop = StopFinder(stops, keep_stop) if stops else None
        self._reasoning = reasoning
        self._syntax = syntax
        self._parallel = parallel_calls
        self._parser: CallParser | None = None
        self._held = ""
        self.state = REASONING if reasoning and thinking else START if reasoning or syntax else CONTENT
        self._strip = self.state == REASONING  # the next newlines belong to a marker
        self._plain = reasoning is None and syntax is None

    @property
    def stopped(self) -> bool:
        return self.call_ended or (self._stop is not None and self._stop.found is not None)

    @property
    def stop_string(self) -> str | None:
        return self._stop.found if self._stop is not None else None

    def feed(self, text: str, out: Output) -> None:
        """Route the text of one token."""
        if self._stop is not None:
            text = self._stop.feed(text)
        if self._plain:
            out.content += text
        elif text:
            self._route(text, out)

    def finish(self, out: Output) -> None:
        """No more text comes: give out what was held back."""
        if self._stop is not None and self._stop.found is None:
            rest = self._stop.finish()
            if self._plain:
                out.content += rest
            else:
                self._route(rest, out)
        held, self._held = self._held, ""
        if self.state == TOOL:
            assert self._parser is not None
            self._calls(held, out)
            out.content += self._parser.close()
        else:
            self._emit(held, out)

    # A state's markers, the text between them, and what a marker leads to.

    def _markers(self) -> tuple[str, ...]:
        syntax = self._syntax
        if self.state == REASONING:
            assert self._reasoning is not None
            return (self._reasoning.close,)
        if self.state == TOOL:
            assert syntax is not None
            return (syntax.close,) if syntax.close else ()
        markers = syntax.opens if syntax is not None and (self.state == START or not syntax.at_start) else ()
        if self.state == START and self._reasoning is not None:
            markers = (*markers, self._reasoning.open)
        return markers

    def _route(self, text: str, out: Output) -> None:
        text = self._held + text
        self._held = ""
        while text and not self.call_ended:
            markers = self._markers()
            found = [(start, marker) for marker in markers if (start := text.find(marker)) >= 0]
            if self.state == START:
                # Reasoning, and the calls of some syntaxes, only come first; elsewhere their markers are mere text.
                head = text.lstrip()
                found = [(start, marker) for start, marker in found if not text[:start].strip()]
                if not found:
                    if not head or any(marker.startswith(head) for marker in markers):
                        self._held = text
                        return
                    self.state = CONTENT
                    continue
            if found:
                start, marker = min(found)
                self._before_marker(text[:start], out)
                text = self._enter(marker, out) + text[start + len(marker):]
                continue
            held = partial_suffix(text, markers)
            body = text[: len(text) - held]
            if self.state != TOOL and markers:
                body = body.rstrip("\n")  # newlines before a marker belong to it
            self._held = text[len(body):]
            self._emit(body, out)
            return

    def _before_marker(self, text: str, out: Output) -> None:
        if self.state == TOOL:
            self._calls(text, out)
        else:
            self._emit(text.rstrip("\n"), out)

    def _enter(self, marker: str, out: Output) -> str:
        """Change the state; returns the part of the marker that is text of the new one."""
        reasoning, syntax = self._reasoning, self._syntax
        self._strip = True
        if self.state == TOOL:
            assert self._parser is not None
            rest = self._parser.close()
            out.content += rest + marker if rest else ""
            self.state = CONTENT
            if not self._parallel and self.calls:
                self.call_ended = True
        elif self.state == REASONING:
            self.state = START if syntax is not None else CONTENT
            self._reasoning = None
        elif reasoning is not None and marker == reasoning.open:
            self.state = REASONING
        else:
            assert syntax is not None
            self.state = TOOL
            self._parser = syntax.parser(marker)
            return marker if marker == "{" else ""
        return ""

    def _emit(self, text: str, out: Output) -> None:
        if self._strip:
            text = text.lstrip("\n")
            if not text:
                return
            self._strip = False
        if self.state == REASONING:
            out.reasoning += text
        elif self.state == TOOL:
            self._calls(text, out)
        else:
            out.content += text

    def _calls(self, text: str, out: Output) -> None:
        """Feed the call parser; its events become tool_calls deltas."""
        assert self._parser is not None and self._syntax is not None
        for kind, value in self._parser.feed(text):
            if kind == "name":
                if self.calls and not self._parallel:
                    self.call_ended = True
                    return
                out.calls.append({"index": self.calls, "id": self._syntax.make_id(), "type": "function",
                                  "function": {"name": value, "arguments": ""}})
                self.calls += 1
            elif value:
                out.calls.append({"index": self.calls - 1, "function": {"arguments": value}})
