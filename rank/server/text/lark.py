"""Writes the grammar of a whole answer, thoughts and tool calls included, in llguidance's variety of Lark.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any


class Lark:
    """A grammar while it is being written. Its methods return expressions for the right side of a rule."""

    def __init__(self, added: Mapping[str, int]):
        """added: the ids of the tokenizer's added tokens, by their text."""
        self.added = added
        self._lines: list[str] = []
        self._parts: list[dict[str, Any]] = []
        self._texts: dict[tuple[str, ...], str] = {}  # names of TEXT terminals, by the markers that they leave out

    def literal(self, text: str) -> str:
        return json.dumps(text) if text else '""'

    def marker(self, text: str) -> str:
        """A marker: the token that it is, or spelled out where there is none. Spelled beside a token it is text."""
        return f"<[{self.added[text]}]>" if text in self.added else self.literal(text)

    def call(self, name: str, arguments: str, key: str = "arguments") -> str:
        """{"name": …, "arguments": …}, with an expression for the arguments."""
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
        return f'{self.literal(head)} {arguments} "}}"'

    def calls(self, tools: Iterable[tuple[str, str]], several: bool) -> str:
        """A list of calls as JSON. tools: names, each with an expression for its arguments."""
        one = self.rule(" | ".join(self.call(*tool) for tool in tools))
        return f'"[" {one} (", " {one})* "]"' if several else f'"[" {one} "]"'

    def part(self, part: dict[str, Any]) -> str:
        """Another grammar, {"json_schema": …} or {"lark_grammar": …}."""
        self._parts.append({**part, "name": f"part_{len(self._parts)}"})
        return f"@part_{len(self._parts) - 1}"

    def rule(self, expression: str, attributes: str = "") -> str:
        name = f"rule_{len(self._lines)}"
        self._lines.append(f"{name}{attributes}: {expression}")
        return name

    def text(self, markers: tuple[str, ...]) -> str:
        """Any text in which none of the markers occurs."""
        if not markers:
            return "/(?s:.*)/"
        if markers not in self._texts:
            name = self._texts[markers] = f"TEXT_{len(self._texts)}"
            self._lines.append(f"{name}: /(?s:.*)/ & ~/(?s:.*)({_any_of(markers)})(?s:.*)/")
        return self._texts[markers]

    def until(self, markers: tuple[str, ...], without: tuple[str, ...] = ()) -> str:
        """Any text up to and with the first of these markers, and without others."""
        ways = [f"{self.text((*markers, *without))} {self.marker(one)}" for one in markers if one in self.added]
        if spelled := tuple(one for one in markers if one not in self.added):
            ways.append(self.rule(self.text(without), f"[suffix=/{_any_of(spelled)}/]"))
        return f"({' | '.join(ways)})"

    def grammar(self, start: str) -> str:
        """The whole, for llguidance."""
        lines = "\n".join([f"start: {start}", *self._lines]) + "\n"
        return json.dumps({"grammars": [{"name": "answer", "lark_grammar": lines}, *self._parts]})


def _any_of(markers: tuple[str, ...]) -> str:
    """A regular expression of texts."""
    return "|".join(re.sub(r"[][.^$*+?(){}|\\/&~]", lambda found: "\\" + found[0], one) for one in markers)
