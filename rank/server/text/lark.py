"""Writes the grammar of a whole answer, thoughts and tool calls included, in llguidance's variety of Lark.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

ANY_NAME = "/[A-Za-z_][A-Za-z0-9_]{0,31}/"  # of an argument that no schema names
GAP = r"/[ \n]{0,4}/"  # between calls and behind the last: a model that has written a newline may still end
SIGN = re.compile(r"[^\w\s]")


class Called(Protocol):
    """A tool, for the grammar of its calls."""

    name: str

    @property
    def arguments(self) -> str:
        """The expression of its arguments as JSON."""


class Lark:
    """A grammar while it is being written. Its methods return expressions for the right side of a rule."""

    def __init__(self, added: Mapping[str, int]):
        """added: the ids of the tokenizer's added tokens, by their text."""
        self.added = added
        self._lines: list[str] = []
        self._count = 0  # of names
        self._parts: dict[str, str] = {}  # expressions, by their grammars as JSON
        self._texts: dict[tuple[str, ...], str] = {}  # names of TEXT terminals, by the markers that they leave out
        signs = [re.escape(one) for one in sorted(added, key=len, reverse=True) if len(one) > 1 and SIGN.search(one)]
        self._tokens = re.compile(f"({'|'.join(signs) or '(?!)'})")

    def literal(self, text: str) -> str:
        return json.dumps(text) if text else '""'

    def marker(self, text: str) -> str:
        """A marker: the tokens that are in it, the rest spelled out. Spelled next to a token it is text."""
        if text in self.added:
            return f"<[{self.added[text]}]>"
        pieces = filter(None, self._tokens.split(text))
        return " ".join(f"<[{self.added[one]}]>" if one in self.added else self.literal(one) for one in pieces)

    def call(self, name: str, arguments: str, key: str = "arguments") -> str:
        """{"name": …, "arguments": …}, with an expression for the arguments."""
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
        return f'{self.literal(head)} {arguments} "}}"'

    def calls(self, tools: Iterable[Called], several: bool) -> str:
        """A list of calls as JSON."""
        one = self.rule(" | ".join(self.call(tool.name, tool.arguments) for tool in tools))
        return f'"[" {one} (", " {one})* "]"' if several else f'"[" {one} "]"'

    def repeated(self, call: str, opening: str = "") -> str:
        """One call or several, each further one behind an opening marker, with white space between them."""
        return f"{call} ({GAP} {opening} {call})* {GAP}"

    def part(self, part: dict[str, Any]) -> str:
        """Another grammar, {"json_schema": …} or {"lark_grammar": …}."""
        key = json.dumps(part)
        return self._parts.setdefault(key, f"@part_{len(self._parts)}")

    def name(self, kind: str = "rule") -> str:
        """A new one; `define` gives it its meaning later. Those of terminals are upper case."""
        self._count += 1
        return f"{kind}_{self._count}"

    def define(self, name: str, expression: str, attributes: str = "") -> str:
        self._lines.append(f"{name}{attributes}: {expression}")
        return name

    def rule(self, expression: str, attributes: str = "") -> str:
        return self.define(self.name(), expression, attributes)

    def listed(self, items: Sequence[tuple[str, bool]], separator: str) -> str:
        """A rule for items in order with a separator between them. Each may be left out where the bool is false."""
        behind: str | None = None  # what follows one of the items
        alone = '""'  # the items from here on, where none came before
        for expression, needed in reversed(items):
            then = f" {behind}" if behind else ""
            first = f"{expression}{then}"
            alone = self.rule(first if needed else f"{first} | {alone}")
            more = f"{separator} {first}"
            behind = self.rule(more if needed else f"{more} | {behind or chr(34) * 2}")
        return alone

    def text(self, markers: tuple[str, ...]) -> str:
        """Any text in which none of the markers occurs."""
        if not markers:
            return "/(?s:.*)/"
        if markers not in self._texts:
            self._texts[markers] = self.define(self.name("TEXT"), f"/(?s:.*)/ & {without(markers)}")
        return self._texts[markers]

    def until(self, markers: tuple[str, ...], without: tuple[str, ...] = ()) -> str:
        """Any text up to and with the first of these markers, and without others."""
        # A marker of several tokens cannot be an end that is searched for: its first token is.
        ways = [f"{self.text((*markers, *without))} {self.marker(one)}" for one in markers if self._begins(one)]
        if spelled := tuple(one for one in markers if not self._begins(one)):
            ways.append(self.rule(self.text(without), f"[suffix=/{any_of(spelled)}/]"))
        return f"({' | '.join(ways)})"

    def _begins(self, marker: str) -> bool:
        """Whether it begins with a token of its own."""
        return self._tokens.match(marker) is not None

    def ended(self, terminal: str, close: str, newline: str = "", forbidden: tuple[str, ...] = ()) -> str:
        """A text of this terminal up to and with a marker, which is not in it; with the newline before the marker.

        forbidden: all markers that are not in the text, where there are others.
        """
        body = f"({terminal}) & {without(forbidden or (close,))}"
        if self._begins(close):
            end = f" {self.literal(newline)}" if newline else ""
            return f"{self.define(self.name('TEXT'), f'({body}){end}')} {self.marker(close)}"
        name = self.define(self.name("TEXT"), body)
        return self.rule(name, f"[suffix=/{any_of((newline + close,))}/]")

    def grammar(self, start: str) -> str:
        """The whole, for llguidance."""
        lines = "\n".join([f"start: {start}", *self._lines]) + "\n"
        parts = [{**json.loads(part), "name": name[1:]} for part, name in self._parts.items()]
        return json.dumps({"grammars": [{"name": "answer", "lark_grammar": lines}, *parts]})


def without(markers: tuple[str, ...]) -> str:
    """A terminal's condition: the text has none of these in it."""
    return f"~/(?s:.*)({any_of(markers)})(?s:.*)/"


def any_of(texts: tuple[str, ...]) -> str:
    """A regular expression of texts."""
    return "|".join(_escaped(one) for one in texts)


def _escaped(text: str) -> str:
    text = re.sub(r"[][.^$*+?(){}|\\/&~#-]", lambda found: "\\" + found[0], text)
    return re.sub(r"[\x00-\x1f]", lambda found: f"\\x{ord(found[0]):02x}", text)
