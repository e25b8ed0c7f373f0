"""[NAME(KEY=VALUE, …), …], calls of Python: Llama 4, Llama 3.2 and OLMo 3.

Llama 4 may put them between <|python_start|> and <|python_end|>; OLMo 3 writes them line by line between
<function_calls> and </function_calls>. Without a marker the function has to be one of the offered tools.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..argument_schema import Parameters, Schema, Unwritable, alternatives
from ..headed_calls import HeadedCalls
from ..heads import NAME, Head
from ..lark import ANY_NAME, Lark
from ..notation import Notation, Values
from ..schema_values import literal, quote
from . import CallableTool, ToolCallFormat, ToolCallParser, Tools

OPENS = ("<|python_start|>", "<function_calls>")
ENDS = ("<|python_end|>", "</function_calls>")
HEAD = Head(rf"\s{{0,8}}\[?\s{{0,8}}{NAME}\((?=\s{{0,8}}(?:\w{{1,64}}\s{{0,2}}=|\)))", "[f(k=", "[f()")
KEY = re.compile(r"\s*(\w+)\s*=(?!=)")
STRUCTURE = re.compile(r"[\"'()\[\]{},]")


class PythonArguments:
    """Reads keyword arguments as JSON, each when it is complete."""

    def __init__(self, schema: Mapping[str, Any]):
        self._names = Parameters(schema).names
        self._text = ""  # of this argument
        self._at = 0  # so much of it was looked at
        self._quote = ""  # of the string that is being read
        self._depth = 0
        self._count = 0

    def feed(self, text: str) -> tuple[str, str | None]:
        self._text += text
        written = ""
        while self._at < len(self._text):
            if self._quote:
                if not self._read_string():
                    break
                continue
            found = STRUCTURE.search(self._text, self._at)
            if found is None:
                self._at = len(self._text)
                break
            char, self._at = found[0], found.end()
            if char in "\"'":
                self._quote = char
            elif char in "([{":
                self._depth += 1
            elif self._depth:
                self._depth -= char in ")]}"
            elif char == ",":
                written += self._take()
            else:  # the closing parenthesis, or what stands in its place
                rest = self._text[self._at :]
                return written + self._take() + ("}" if self._count else "{}"), rest
        return written, None

    def _read_string(self) -> bool:
        """Go on to the string's end; False where it has not come yet."""
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == "\\":
                if self._at + 1 == len(self._text):
                    return False
                self._at += 1
            self._at += 1
            if char == self._quote:
                self._quote = ""
                return True
        return False

    def _take(self) -> str:
        """The argument before the character that was read last."""
        text, self._text = self._text[: self._at - 1], self._text[self._at :]
        self._at = 0
        return self._write(text)

    def _write(self, text: str) -> str:
        key = KEY.match(text)
        value = text[key.end() :] if key else text
        if not value.strip():
            return ""
        name = key[1] if key else self._names[self._count] if self._count < len(self._names) else f"{self._count}"
        written = f"{', ' if self._count else '{'}{quote(name)}: {literal(value.strip())}"
        self._count += 1
        return written

    def finish(self) -> str:
        return self._write(self._text) if self._text.strip() else ""


def calls(marker: str, index: int, tools: Tools, close: tuple[str, ...]) -> ToolCallParser:
    return HeadedCalls(
        marker,
        index,
        HEAD,
        lambda name: PythonArguments(tools.get(name, {})),
        close=close,
        between=(",", "]"),
        known=() if marker else tools,
    )


def parser(marker: str, index: int, tools: Tools) -> ToolCallParser:
    return calls(marker, index, tools, ENDS)


def _string(lark: Lark, tool: CallableTool, plain: Schema) -> str:
    """In JSON, of which only those escapes are used that mean the same in Python."""
    limits = ("minLength", "maxLength", "pattern", "format")
    schema = {"type": "string", **{name: plain[name] for name in limits if name in plain}}
    return tool.json(schema, json_allowed_escapes='nrt\\"')


def _quoted(lark: Lark, text: str) -> str:
    return lark.literal(quote(text))


NOTATION = Notation("True", "False", "None", ", ", ": ", _string, _quoted, _quoted, f'"\\"" {ANY_NAME} "\\""')


def _key(name: str) -> str:
    if not re.fullmatch(r"\w{1,64}", name):
        raise Unwritable(f"the parameter's name {quote(name)} cannot be written in this model's calls")
    return name


def grammar(lark: Lark, tools: Sequence[CallableTool], several: bool, marker: str) -> str:
    """[f(…), …]; with OLMo's marker a line for each."""
    calls = []
    for tool in tools:
        values, ways = Values(lark, tool, NOTATION), []
        for shape in alternatives(tool.schema, tool.schema):
            properties, required = tool.properties(shape)
            ways.append(values.pairs(properties, required, lambda name: lark.literal(f"{_key(name)}=")))
        calls.append(f'{lark.literal(tool.name + "(")} ({" | ".join(ways)}) ")"')
    one = lark.rule(" | ".join(calls))
    if marker == OPENS[1]:
        more = f' ("\\n" {one})*' if several else ""
        return f'"\\n"? {one}{more} "\\n"? {lark.marker(ENDS[1])}'
    more = f' (", " {one})*' if several else ""
    return f'"[" {one}{more} "]"{f" {lark.marker(ENDS[0])}" if marker else ""}'


FORMAT = ToolCallFormat(
    matches=lambda template: any(marker in template for marker in OPENS),
    opens=OPENS,
    parser=parser,
    markers=ENDS,
    bare="[",
    models=("llama4",),
    grammar=grammar,
)
