"""MiniMax M3: an element for each argument and for what lists and objects hold, a token before each tag.

]<]minimax[>[<tool_call>
]<]minimax[>[<invoke name="NAME">]<]minimax[>[<KEY>VALUE]<]minimax[>[</KEY>]<]minimax[>[</invoke>
]<]minimax[>[</tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from ..argument_schema import GRAMMAR, Parameters, Schema, Unwritable, alternatives, enumerated, plain_types
from ..headed_calls import HeadedCalls
from ..heads import NAME, Head
from ..lark import Lark
from ..notation import ALL_KNOWN, KNOWN, NUMBERS
from ..raw_strings import terminal
from ..schema_values import quote, to_json
from ..stop_strings import partial_suffix
from . import CallableTool, ToolCallFormat, ToolCallParser, Tools

TOKEN = "]<]minimax[>["
OPEN, CLOSE = f"{TOKEN}<tool_call>", f"{TOKEN}</tool_call>"
INVOKE = f'{TOKEN}<invoke name="'
END = f"{TOKEN}</invoke>"
HEAD = Head(rf'\s{{0,8}}{re.escape(TOKEN)}<invoke name="{NAME}">', f'{INVOKE}f">')
KEY = r'[^<>\s"/][^<>\s"]{0,127}'
TAG = Head(rf"{re.escape(TOKEN)}<(?P<close>/?)(?P<name>{KEY})>", f"{TOKEN}<k>", f"{TOKEN}</k>")
ITEM = "item"  # the element of each item of a list


class _Element:
    """An element that has not ended."""

    def __init__(self, name: str, schema: Parameters, kind: str = ""):
        self.name = name
        self.schema = schema
        self.kind = kind or ("string" if schema.own_types == {"string"} else "")  # "": its first tag or its end tells
        self.text = ""  # of a value whose kind is not known yet
        self.filled = False  # a list or an object has something in it

    def begin(self, name: str) -> tuple[str, _Element]:
        """The JSON in front of an element within this one, and the element."""
        listed = self.kind == "array"
        opening = ", " if self.filled else "[" if listed else "{"
        self.filled = True
        child = _Element(name, self.schema.item if listed else self.schema.member(name))
        return f"{opening}{'' if listed else f'{quote(name)}: '}{chr(34) if child.kind == 'string' else ''}", child

    def contain(self, name: str) -> bool:
        """Makes it a list or an object, by the tag of what it has in it; false where it is neither."""
        kinds = self.schema.own_types & {"array", "object"}
        if self.kind or self.text.strip() or not kinds:
            return self.kind in ("array", "object")
        self.kind = "array" if "array" in kinds and (name == ITEM or "object" not in kinds) else "object"
        return True

    def end(self) -> str:
        """The end of its JSON."""
        if self.kind == "string":
            return '"'
        if self.kind:
            return (
                {"array": "]", "object": "}"}[self.kind] if self.filled else {"array": "[]", "object": "{}"}[self.kind]
            )
        types = self.schema.own_types
        if not self.text.strip() and "string" not in types:
            empty = {"array": "[]", "object": "{}", "null": "null"}
            return next((value for kind, value in empty.items() if kind in types), '""')
        return to_json(self.text, types)


class ElementArguments:
    """Reads elements as JSON. A text is passed on as it comes, other values when their element ends.

    An element that a model does not close ends with the one that it stands in.
    """

    def __init__(self, schema: Any):
        self._open = [_Element("", Parameters(schema), "object")]
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        text, self._held = self._held + text, ""
        written = ""
        while True:
            at = text.find(TOKEN)
            before = text[: at if at >= 0 else len(text) - partial_suffix(text, (TOKEN,))]
            inner = self._open[-1]
            if inner.kind in ("array", "object") and (junk := before.lstrip()):
                return written + self._close(0), text[len(before) - len(junk) :]
            written += self._add(before)
            text = text[len(before) :]
            if at < 0:
                self._held = text
                return written, None
            tag = TAG.match(text)
            if tag is None and TAG.may_come(text):
                self._held = text
                return written, None
            if inner.kind in ("array", "object") and text.startswith(INVOKE):
                return written + self._close(0), text
            found = self._follow(tag) if tag else None
            if found is None:
                found = self._add(TOKEN)
                text = text[len(TOKEN) :]
            elif self._open:
                text = text[tag.end() :] if tag else text
            else:
                return written + found, text.removeprefix(END)
            written += found

    def _add(self, text: str) -> str:
        """More of the innermost value."""
        inner = self._open[-1]
        if inner.kind == "string":
            return quote(text)[1:-1]
        if not inner.kind:
            inner.text += text
        return ""

    def _follow(self, tag: re.Match[str]) -> str | None:
        """The JSON of a tag; None where it is part of a text."""
        inner, name = self._open[-1], tag["name"]
        if not tag["close"]:
            if not inner.contain(name):
                return None
            opening, child = inner.begin(name)
            self._open.append(child)
            return opening
        depth = next((i for i in range(len(self._open) - 1, 0, -1) if self._open[i].name == name), 0)
        if depth and (depth == len(self._open) - 1 or inner.kind != "string"):
            return self._close(depth)
        return self._close(0) if name in ("invoke", "tool_call") else None

    def _close(self, depth: int) -> str:
        """Ends the elements from this one inwards."""
        ended = "".join(one.end() for one in reversed(self._open[depth:]))
        del self._open[depth:]
        return ended

    def finish(self) -> str:
        """An element that has not ended stays open, as in a call in JSON."""
        if len(self._open) == 1:
            return self._close(0)
        inner = self._open[-1]
        return quote(self._held)[1:-1] if inner.kind == "string" else inner.text


def parser(marker: str, index: int, tools: Tools) -> ToolCallParser:
    return HeadedCalls(marker, index, HEAD, lambda name: ElementArguments(tools.get(name, {})), close=(CLOSE,))


class _Grammar:
    """The grammar of one tool's arguments."""

    def __init__(self, lark: Lark, tool: CallableTool):
        self._lark = lark
        self._tool = tool
        self._rules: dict[str, str] = {}

    def arguments(self) -> str:
        """The elements of all arguments. Without a schema there are none: an end tag has to repeat a name."""
        shapes = [self._members(shape) for shape in alternatives(self._tool.schema, self._tool.schema)]
        if not shapes:
            raise Unwritable("its schema allows nothing")
        return f"({' | '.join(dict.fromkeys(shapes))})"

    def _members(self, shape: Schema) -> str:
        found = self._tool.members(*self._tool.properties(shape), self._element)
        return " ".join(one + ("" if needed else "?") for one, needed in found) or '""'

    def _element(self, name: str, schema: Any) -> str:
        """An element as a rule, one for each name and schema: a schema may refer to itself."""
        key = json.dumps([name, schema])
        if key not in self._rules:
            if not re.fullmatch(KEY, name):
                raise Unwritable(f"the name {quote(name)} cannot be written in this model's calls")
            self._rules[key] = self._lark.name()
            close = f"{TOKEN}</{name}>"
            try:
                plain = alternatives(schema, self._tool.schema)
                self._check(name, plain)
                ways = dict.fromkeys(way for one in plain for way in self._ways(one, close))
                if not ways:
                    raise Unwritable(f"the schema of {quote(name)} allows nothing")
            except Unwritable:
                del self._rules[key]  # nothing defines it, so it must not be named where the schema stands again
                raise
            self._lark.define(self._rules[key], f"{self._lark.marker(f'{TOKEN}<{name}>')} ({' | '.join(ways)})")
        return self._rules[key]

    def _check(self, name: str, plain: list[Schema]) -> None:
        """Raises Unwritable for limits that a strict tool's text could evade, as it is read as a number."""
        texts = any("string" in plain_types(one) and enumerated(one) is None for one in plain)
        if self._tool.strict and texts and any(limit in one for one in plain for limit in NUMBERS):
            raise Unwritable(f"the limits of {quote(name)} cannot be enforced beside texts in this model's calls")
        for one in plain:
            self._tool.check(one, ALL_KNOWN)

    def _ways(self, plain: Schema, close: str) -> list[str]:
        """Values of a plain schema, each with the end tag."""
        lark, kinds, end = self._lark, plain_types(plain), self._lark.marker(close)
        if (values := enumerated(plain)) is not None:
            return [f"{self._literal(value)} {end}" for value in values]
        ways = []
        if GRAMMAR in plain:
            ways.append(f"{lark.part({'lark_grammar': plain[GRAMMAR]})} {end}")
        elif "string" in kinds:
            ways.append(lark.ended(terminal(plain, self._tool.strict), close))
        if "array" in kinds and "items" in plain and "prefixItems" not in plain:
            ways.append(f"{self._items(plain)} {end}")
            kinds -= {"array"}
        if "object" in kinds and plain.get("properties"):
            ways.append(f"{self._members({key: plain[key] for key in KNOWN['object'] if key in plain})} {end}")
            kinds -= {"object"}
        if rest := sorted(kinds - {"string"}):  # as JSON, which is read as such
            ways.append(f"{self._tool.json({**plain, 'type': rest})} {end}")
        return ways

    def _items(self, plain: Schema) -> str:
        fewest, most = int(plain.get("minItems", 0)), plain.get("maxItems")
        if plain["items"] is False or most == 0:
            return '""'
        return f"{self._element(ITEM, plain['items'])}{{{fewest},{'' if most is None else int(most)}}}"

    def _literal(self, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if TOKEN in text:
            raise Unwritable(f"the text {quote(text)} cannot be written in this model's calls")
        return self._lark.literal(text)


def grammar(lark: Lark, tools: Sequence[CallableTool], several: bool, marker: str) -> str:
    calls = (f"{lark.literal(tool.name + chr(34) + '>')} {_Grammar(lark, tool).arguments()}" for tool in tools)
    one = lark.rule(f'"\\n"? {lark.marker(INVOKE)} ({" | ".join(calls)}) {lark.marker(END)} "\\n"?')
    return f"{lark.repeated(one) if several else one} {lark.marker(CLOSE)}"


FORMAT = ToolCallFormat(
    matches=lambda template: TOKEN in template and "<tool_call>" in template,
    opens=(OPEN,),
    parser=parser,
    grammar=grammar,
    markers=(CLOSE, END, TOKEN),
    raw=True,
    models=("minimax_m3_vl", "minimax_m3_vl_text"),
)
