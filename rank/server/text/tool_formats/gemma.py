"""Gemma: JSON-like arguments with keys as bare words, and texts between tokens instead of quotation marks.

FunctionGemma: <start_function_call>call:NAME{KEY:<escape>TEXT<escape>,KEY:5}<end_function_call>
Gemma 4:       <|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>,KEY:5}<tool_call|>
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..argument_schema import GRAMMAR, Schema, Unwritable, alternatives
from ..headed_calls import HeadedCalls
from ..heads import NAME, Head
from ..lark import ANY_NAME, Lark
from ..notation import Notation, Values
from ..raw_strings import terminal
from ..schema_values import TYPES, quote, to_json
from ..stop_strings import partial_suffix
from . import CallableTool, ToolCallFormat, ToolCallParser, Tools

# How a call begins: how it ends, and the token around texts.
FORMS = {
    "<start_function_call>": ("<end_function_call>", "<escape>"),
    "<|tool_call>": ("<tool_call|>", '<|"|>'),
}
HEAD = Head(rf"\s{{0,8}}call:\s{{0,8}}{NAME}\s{{0,8}}(?=\{{)", "call:f{")
STRUCTURE = re.compile(r"[{}\[\],:]")
PAIRS, CLOSE = {"{": "}", "[": "]"}, "}]"
ALL = frozenset(TYPES)


class GemmaArguments:
    """Reads such an object as JSON: brackets, commas and colons are JSON's, words between them become values."""

    def __init__(self, end: str, mark: str):
        self._end = end
        self._mark = mark  # around texts
        self._held = ""
        self._within = False  # a text
        self._open = ""  # brackets that close those that are open, the innermost first

    def feed(self, text: str) -> tuple[str, str | None]:
        text, self._held = self._held + text, ""
        written, at = "", 0
        while at < len(text):
            mark = text.find(self._mark, at)
            end = text.find(self._end, at)
            if self._within:
                stop = min((one for one in (mark, end) if one >= 0), default=-1)
                sure = stop if stop >= 0 else len(text) - partial_suffix(text[at:], (self._mark, self._end))
                written += quote(text[at:sure])[1:-1]
                if stop < 0:
                    self._held = text[sure:]
                    return written, None
                at, self._within = stop if stop == end else stop + len(self._mark), False
                written += '"'
                continue
            found = STRUCTURE.search(text, at)
            at_end = found.start() if found else len(text)
            if 0 <= end < at_end and not 0 <= mark < end:  # brackets are missing
                return written + self._word(text[at:end]) + self._open, text[end:]
            if 0 <= mark < at_end:
                at, self._within = mark + len(self._mark), True
                written += '"'
                continue
            if found is None:
                self._held = text[at:]
                return written, None
            written += self._word(text[at:at_end], key=found[0] == ":") + self._space(found[0])
            at = at_end + 1
            if found[0] in PAIRS:
                self._open = PAIRS[found[0]] + self._open
            elif found[0] in CLOSE:
                self._open = self._open[1:]
            if not self._open:
                return written, text[at:]
        return written, None

    def _word(self, text: str, key: bool = False) -> str:
        text = text.strip()
        if not text:
            return ""
        return quote(text) if key else to_json(text, ALL)

    def _space(self, char: str) -> str:
        return f"{char} " if char in ",:" else char

    def finish(self) -> str:
        return quote(self._held)[1:-1] if self._within else self._word(self._held)


def parser(marker: str, index: int, tools: Tools) -> ToolCallParser:
    end, mark = FORMS[marker]
    return HeadedCalls(marker, index, HEAD, lambda name: GemmaArguments(end, mark), close=(end,), one=True)


def _key(lark: Lark, name: str) -> str:
    if STRUCTURE.search(name) or name != name.strip() or not name or "<" in name:
        raise Unwritable(f"the name {quote(name)} cannot be written in this model's calls")
    return lark.literal(name)


def _notation(mark: str) -> Notation:
    def string(lark: Lark, tool: CallableTool, plain: Schema) -> str:
        if GRAMMAR in plain:
            return f"{lark.marker(mark)} {lark.part({'lark_grammar': plain[GRAMMAR]})} {lark.marker(mark)}"
        return f"{lark.marker(mark)} {lark.ended(terminal(plain, tool.strict), mark)}"

    def quoted(lark: Lark, text: str) -> str:
        if mark in text:
            raise Unwritable(f"the text {quote(text)} cannot be written in this model's calls")
        return f"{lark.marker(mark)} {lark.literal(text)} {lark.marker(mark)}"

    return Notation("true", "false", "null", ",", ":", string, quoted, _key, ANY_NAME)


def grammar(lark: Lark, tools: Sequence[CallableTool], several: bool, marker: str) -> str:
    end, mark = FORMS[marker]
    calls = []
    for tool in tools:
        values = Values(lark, tool, _notation(mark))
        shapes = [values.object(shape, 0) for shape in alternatives(tool.schema, tool.schema)]
        calls.append(f"{lark.literal(f'call:{tool.name}')} ({' | '.join(shapes)})")
    one = lark.rule(f"({' | '.join(calls)}) {lark.marker(end)}")
    return lark.repeated(one, lark.marker(marker)) if several else one


FORMAT = ToolCallFormat(
    matches=lambda template: any(marker in template for marker in FORMS),
    opens=tuple(FORMS),
    parser=parser,
    markers=tuple(marker for form in FORMS.values() for marker in form),
    models=("gemma4",),
    grammar=grammar,
    raw=True,
)
