"""The grammar of arguments between tags: texts as they are, other values as JSON, all by the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .argument_schema import GRAMMAR, Parameters, Schema, Unwritable, alternatives, enumerated, plain_types
from .lark import ANY_NAME, Lark
from .raw_strings import ANY, terminal
from .schema_values import to_json
from .tagged_arguments import Tags
from .tool_formats import CallableTool

# How texts begin that are read as values of a type. Of the first two kinds JSON alone is allowed where there are any.
BEGINNINGS = {
    "array": r"\[",
    "object": r"\{",
    "number": "[0-9+.-]",
    "boolean": "([Tt]rue|[Ff]alse)",
    "null": "null|None",
}
BLANKS = r"[\s\x1c-\x1f]*"
WORDS = {
    "null": "/null/",
    "boolean": "/true|false/",
    "integer": "/-?(0|[1-9][0-9]{0,15})/",
    "number": r"/-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?/",
}
LIMITS = ("enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def tagged_calls(
    lark: Lark, tools: Sequence[CallableTool], tags: Tags, before: str, behind: str, end: str
) -> str:  # fmt: skip
    """One call of any of the tools: its head, `before` and `behind` the function's name, its arguments, the end."""
    ways = [
        f"{_spelled(lark, before)} {lark.literal(tool.name)} {_spelled(lark, behind)} "
        f"{_Arguments(lark, tool, tags).all()} {_spelled(lark, end)}"
        for tool in tools
    ]
    return lark.rule(" | ".join(ways))


def _spelled(lark: Lark, text: str) -> str:
    """Markers; where there is a newline in the text there may be none."""
    lines = [lark.marker(line) for line in text.split("\n")]
    return ' "\\n"? '.join(lines)


class _Arguments:
    """The grammar of one tool's arguments."""

    def __init__(self, lark: Lark, tool: CallableTool, tags: Tags):
        self._lark = lark
        self._tool = tool
        self._tags = tags
        self._read = Parameters(tool.schema)

    def all(self) -> str:
        ways = [self._shape(shape) for shape in alternatives(self._tool.schema, self._tool.schema)]
        if not ways:
            raise Unwritable("its schema allows nothing")
        return f"({' | '.join(dict.fromkeys(ways))})"

    def _shape(self, shape: Schema) -> str:
        properties, required = self._tool.properties(shape)
        if not properties:
            if shape.get("additionalProperties") is False:
                return '""'
            return f"{self._argument(None, shape.get('additionalProperties', {}))}*"
        found = self._tool.members(properties, required, self._argument)
        return " ".join(one + ("" if needed else "?") for one, needed in found)

    def _argument(self, name: str | None, schema: Any) -> str:
        tags, lark = self._tags, self._lark
        written = "f" if name is None else name
        head = tags.head.match(tags.before + written + tags.behind)
        if head is None or head[1] != written:
            raise Unwritable(f"the parameter's name {json.dumps(written)} cannot be written in this model's calls")
        name_expression = ANY_NAME if name is None else lark.literal(name)
        newline = ' "\\n"' if tags.lines else ""
        kinds = frozenset[str]().union(*map(plain_types, alternatives(schema, self._tool.schema)))
        behind = tags.behind if "string" in kinds or not tags.behind_json else tags.behind_json
        opening = f"{_spelled(lark, tags.before)} {name_expression} {_spelled(lark, behind)}{newline}"
        return lark.rule(f'{opening} {self._value(written, schema)} "\\n"?')

    def _value(self, name: str, schema: Any) -> str:
        """A value and the tag behind it."""
        lark, tags, tool = self._lark, self._tags, self._tool
        plain = alternatives(schema, tool.schema)
        types = frozenset().union(*map(plain_types, plain))
        if not types:
            raise Unwritable(f"the schema of the parameter {json.dumps(name)} allows nothing")
        if tool.strict and types != self._read.types(name):
            raise Unwritable(f"the parameter {json.dumps(name)} has other types in another alternative of the schema")
        newline = "\n" if tags.lines else ""
        if grammar := next((one[GRAMMAR] for one in plain if GRAMMAR in one), None):
            return f"{lark.part({'lark_grammar': grammar})} {lark.literal(newline)} {lark.marker(tags.close)}"
        parts = [] if "string" in types else [schema]
        texts = self._texts(plain, types, parts) if "string" in types else []
        ways = [lark.ended(" | ".join(texts), tags.close, newline, tags.forbidden)] if texts else []
        if parts:
            values = " | ".join(tool.json(part) for part in parts)
            ways.append(f"({values}) {lark.literal(newline)} {lark.marker(tags.close)}")
        if not ways:
            raise Unwritable(f"no value of the parameter {json.dumps(name)} can be written in this model's calls")
        return f"({' | '.join(ways)})"

    def _texts(self, plain: list[Schema], types: frozenset[str], parts: list[Schema]) -> list[str]:
        """Terminals of the texts that are read as values of the schema; adds to `parts` what has to be JSON.

        A text may be read as a value of another type: where that type has limits, no text begins as its values do.
        """
        texts, free, listed = [], set(), []
        for one in plain:
            kinds = plain_types(one)
            if (values := enumerated(one)) is not None:
                listed += values
                continue
            if "string" in kinds:
                texts.append(terminal(one, self._tool.strict))
            scalars = {kind for kind in kinds & WORDS.keys() if not any(limit in one for limit in LIMITS)}
            free |= scalars
            if rest := sorted(kinds - scalars - {"string"}):
                parts.append({**one, "type": rest})
        free |= {"integer"} if "number" in free else set()
        bound = {"number" if kind == "integer" else kind for kind in types - free - {"string"}}
        outside = "".join(f" & ~/{BLANKS}({BEGINNINGS[kind]})(?s:.*)/" for kind in sorted(bound))
        found = [f"(({' | '.join(dict.fromkeys(texts))}){outside})"] if texts else []
        if texts and ANY not in texts or not texts and free:
            found += [WORDS[kind] for kind in sorted(free)]
        return found + [self._lark.literal(text) for text in dict.fromkeys(self._written(listed, types))]

    def _written(self, values: list[Any], types: frozenset[str]) -> list[str]:
        """The texts of these values, as far as they are read as the same."""
        found = []
        for value in values:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            if json.loads(to_json(text, types)) == value and not any(mark in text for mark in self._tags.forbidden):
                found.append(text)
        return found
