"""Values that a model writes as plain text, in the types that a tool's schema asks for."""

from __future__ import annotations

import ast
import json
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
PYTHON_ONLY = ("(", "#", "\\")  # Python would read on behind them, to a value that nobody has written
WORDS = {"True": True, "False": False, "None": None}  # as Python writes them


def kinds_of(said: Any) -> frozenset[str]:
    """The kinds in `type` of a schema, a name or several. A number may be an integer."""
    names = frozenset((said,) if isinstance(said, str) else (one for one in said if isinstance(one, str)))
    return names | {"integer"} if "number" in names else names


def to_json(text: str, types: frozenset[str]) -> str:
    """The JSON of a value. What is none of the other types that are allowed is a string."""
    allowed = tuple(kind for name in types - {"string"} for kind in TYPES.get(name, ()))
    if allowed and text.strip()[:1] not in PYTHON_ONLY:
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


def is_json(text: str) -> bool:
    try:
        _json(text)
    except (ValueError, RecursionError):
        return False
    return True


def within_string(text: str) -> bool:
    """Whether it is the beginning of JSON that ends within a string."""
    try:
        _json(text)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        pass
    return False


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
