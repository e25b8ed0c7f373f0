"""The grammar of values by a schema, in notations other than JSON which have its brackets, commas and colons."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from .argument_schema import GRAMMAR, Schema, Unwritable, alternatives, enumerated, plain_types
from .lark import Lark
from .tool_formats import CallableTool

DEPTH = 4  # of lists and objects within each other that no schema describes
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
INTEGER = "/-?(0|[1-9][0-9]{0,15})/"
NUMBER = r"/-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?([eE][+-]?[0-9]{1,2})?/"
KNOWN = {
    "integer": NUMBERS,
    "number": NUMBERS,
    "string": ("minLength", "maxLength", "pattern", "format", GRAMMAR),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "object": ("properties", "required", "additionalProperties"),
}
ALL_KNOWN = {"type", "enum", *(key for keys in KNOWN.values() for key in keys)}


class Notation(NamedTuple):
    """How values are written."""

    true: str
    false: str
    null: str
    comma: str
    colon: str
    string: Callable[[Lark, CallableTool, Schema], str]  # the expression of a text by a plain schema
    quoted: Callable[[Lark, str], str]  # the expression of one text
    key: Callable[[Lark, str], str]  # of an object; raises Unwritable
    any_key: str  # the expression of a key that no schema names


class Values:
    """Writes the expressions of one tool's values."""

    def __init__(self, lark: Lark, tool: CallableTool, notation: Notation):
        self._lark = lark
        self._tool = tool
        self._notation = notation
        self._rules: dict[str, str] = {}  # names, by the schemas as JSON

    def value(self, schema: Any, depth: int = 0) -> str:
        """depth: how many lists and objects it stands in that no schema describes."""
        key = json.dumps([schema, depth])
        if key not in self._rules:
            name = self._rules[key] = self._lark.name()
            try:
                plain = alternatives(schema, self._tool.schema)
                ways = [way for one in plain for way in self._ways(one, depth)]
                if not ways:
                    raise Unwritable(f"the schema {key[1:80]} allows nothing")
            except Unwritable:
                del self._rules[key]  # nothing defines it, so it must not be named where the schema stands again
                raise
            self._lark.define(name, " | ".join(dict.fromkeys(ways)))
        return self._rules[key]

    def _ways(self, plain: Schema, depth: int) -> list[str]:
        self._tool.check(plain, ALL_KNOWN)
        if (values := enumerated(plain)) is not None:
            return [self._literal(value) for value in values]
        notation, kinds = self._notation, plain_types(plain)
        ways = []
        if "string" in kinds:
            ways.append(notation.string(self._lark, self._tool, plain))
        if numbers := sorted(kinds & {"number", "integer"}):
            ways.append(self._number(plain, "number" if "number" in numbers else "integer"))
        if "boolean" in kinds:
            ways.append(f"{self._word(notation.true)} | {self._word(notation.false)}")
        if "null" in kinds:
            ways.append(self._word(notation.null))
        if "array" in kinds and (depth < DEPTH or "items" in plain):
            ways.append(self._array(plain, depth))
        if "object" in kinds and (depth < DEPTH or "properties" in plain):
            ways.append(self.object(plain, depth))
        return ways

    def _word(self, text: str) -> str:
        return self._lark.literal(text)

    def _number(self, plain: Schema, kind: str) -> str:
        limits = {name: plain[name] for name in NUMBERS if name in plain}
        if not limits:
            return NUMBER if kind == "number" else INTEGER
        return self._tool.json({"type": kind, **limits})

    def _array(self, plain: Schema, depth: int) -> str:
        comma = self._word(self._notation.comma)
        first, rest = plain.get("prefixItems") or [], plain.get("items", {})
        fewest, most = int(plain.get("minItems", 0)), plain.get("maxItems")
        depth += "items" not in plain
        if not first and rest is False or most == 0:
            return '"[" "]"'
        items = [(self.value(one, depth), i < fewest) for i, one in enumerate(first[:most])]
        inner = ""
        if rest is not False and (most is None or most > len(first)):
            item = self.value(rest, depth)
            low, high = max(fewest - len(first), 0), None if most is None else int(most) - len(first)
            again = self._lark.rule(f"{comma} {item}")
            if first:
                needed = [(one, True) for one, _ in items]
                inner = f"{self._lark.listed(needed, comma)} {_repeated(again, low, high)}"
            else:
                inner = f"{item} {_repeated(again, max(low - 1, 0), None if high is None else high - 1)}"
        ways = [f'"[" {inner} "]"'] if inner else []
        if first and fewest <= len(first):
            ways.append(f'"[" {self._prefix(items, comma)} "]"')
        elif not first and not fewest:
            ways.append('"[" "]"')
        return " | ".join(ways)

    def _prefix(self, items: list[tuple[str, bool]], comma: str) -> str:
        """The first so many of these, all that are needed."""
        found = ""
        for i, (expression, needed) in reversed(list(enumerate(items))):
            one = f"{comma if i else ''} {expression} {found}"
            found = one if needed else f"({one})?"
        return found

    def object(self, plain: Schema, depth: int) -> str:
        notation = self._notation
        properties, required = self._tool.properties(
            {key: plain[key] for key in KNOWN["object"] if key in plain}
        )  # fmt: skip
        comma, colon = self._word(notation.comma), self._word(notation.colon)
        if properties:
            pairs = self.pairs(properties, required, lambda name: f"{notation.key(self._lark, name)} {colon}")
            return f'"{{" {pairs} "}}"'
        rest = plain.get("additionalProperties", {})
        if rest is False:
            return '"{" "}"'
        pair = self._lark.rule(f"{notation.any_key} {colon} {self.value(rest, depth + 1)}")
        return f'"{{" ({pair} ({comma} {pair})*)? "}}"'

    def pairs(self, properties: dict[str, Any], required: Any, head: Callable[[str], str]) -> str:
        """Names and values with commas between them. head: the expression of a name and what stands behind it."""
        items = self._tool.members(properties, required, lambda name, schema: f"{head(name)} {self.value(schema)}")
        return self._lark.listed(items, self._word(self._notation.comma))

    def _literal(self, value: Any) -> str:
        notation = self._notation
        if value is None or isinstance(value, bool):
            return self._word({True: notation.true, False: notation.false, None: notation.null}[value])
        if isinstance(value, str):
            return notation.quoted(self._lark, value)
        if isinstance(value, int | float):
            return self._word(json.dumps(value))
        comma, colon = self._word(notation.comma), self._word(notation.colon)
        if isinstance(value, list):
            return f'"[" {f" {comma} ".join(map(self._literal, value))} "]"'
        pairs = [f"{notation.key(self._lark, name)} {colon} {self._literal(one)}" for name, one in value.items()]
        return f'"{{" {f" {comma} ".join(pairs)} "}}"'


def _repeated(expression: str, fewest: int, most: int | None) -> str:
    return "" if most == 0 else f"{expression}{{{fewest},{'' if most is None else most}}}"
