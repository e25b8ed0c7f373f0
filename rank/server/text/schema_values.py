"""Values that a model writes as plain text, in the types that a tool's schema asks for."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

TYPES: dict[str, tuple[type, ...]] = {
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
    "string": (str,),
}
WORDS = {"True": True, "False": False, "None": None}  # as Python writes them


def types_of(schema: Any) -> frozenset[str]:
    """The types that a schema allows; all where it does not say."""
    if not isinstance(schema, Mapping):
        return frozenset(TYPES)
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset((kind,))
    if isinstance(kind, list):
        return frozenset(one for one in kind if isinstance(one, str))
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            return frozenset().union(*map(types_of, schema[name]))
    if isinstance(values := schema.get("enum"), list):
        return frozenset(name for name, kinds in TYPES.items() for value in values if type(value) in kinds)
    return frozenset(TYPES)


def to_json(text: str, types: frozenset[str]) -> str:
    """The JSON of a value. What is none of the other types that are allowed is a string."""
    allowed = tuple(kind for name in types - {"string"} for kind in TYPES.get(name, ()))
    if allowed:
        written, value = _read(text)
        if type(value) in allowed:
            return written
    return quote(text)


def literal(text: str) -> str:
    """The JSON of a value as Python or JSON writes it, texts in quotation marks; what is neither is a text."""
    return _read(text)[0]


def _read(text: str) -> tuple[str, Any]:
    """The JSON of a literal, and its value; the text as a string where it is none."""
    for read in (_json, _python):
        try:
            value = read(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
        return (text.strip() if read is _json else json.dumps(value, ensure_ascii=False)), value
    return quote(text), text


def quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse)


def _python(text: str) -> Any:
    if text in WORDS:
        return WORDS[text]
    value = ast.literal_eval(text)
    json.dumps(value, allow_nan=False)  # a set or a complex number is no JSON
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(constant)
