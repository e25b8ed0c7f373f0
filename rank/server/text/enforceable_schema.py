"""JSON schemas as llguidance enforces them: texts of a format and numbers get an end, numbers that it would change are
refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from .argument_schema import Unwritable

# llguidance repeats parts of these formats without end (decimals, labels, path segments), and a model that has
# begun to repeat one of them does not stop. Characters of the longest text; a time has room for 9 places of seconds.
LONGEST = {"time": 24, "date-time": 35, "duration": 32, "email": 254, "hostname": 253, "uri": 2048}
EXACT = 1 << 53  # llguidance reads numbers as 64-bit floats
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# Code generators write the ends of their language's types as bounds.
TYPE_ENDS = frozenset(
    sign * value
    for value in (1 << 63, (1 << 63) - 1, 1 << 64, (1 << 64) - 1, sys.float_info.max, 3.4028234663852886e38)
    for sign in (1, -1)
)
# Digits have no end else, and a model that repeats one does not stop. A number with any bound has no exponent in
# llguidance, so these bounds take none from it; one without may have any, and stays as it is.
LARGEST_INTEGER = (1 << 63) - 1024  # the largest that 64 bits and a float hold; llguidance takes no larger one
LARGEST_NUMBER, PLACES = 10**18, 10  # likewise, before and behind the point
VALUES = ("default", "examples", "example")  # keywords with values that say nothing about what is allowed
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # schemas by names


def enforceable(schema: Any, lenient: bool) -> Any:
    """The schema for llguidance. lenient: ends of number types are left out. Raises Unwritable."""
    # llguidance takes neither of two multiples.
    return _enforceable(schema, lenient, places='"multipleOf"' not in json.dumps(schema))


def _enforceable(schema: Any, lenient: bool, places: bool) -> Any:
    """places: numbers may get an end behind the point."""
    if isinstance(schema, list):
        return [_enforceable(one, lenient, places) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("const", "enum"):
            _check_exact(key, value)
        elif key in BOUNDS and isinstance(value, int | float) and abs(value) > EXACT:
            if lenient and value in TYPE_ENDS:
                continue
            raise Unwritable(_inexact(key, value))
        elif key in NAMED and isinstance(value, dict):
            value = {name: _enforceable(one, lenient, places) for name, one in value.items()}
        elif key not in VALUES:
            value = _enforceable(value, lenient, places)
        found[key] = value
    form, shortest, longest = (found.get(key) for key in ("format", "minLength", "maxLength"))
    end = LONGEST.get(form) if isinstance(form, str) else None
    if end and not (isinstance(shortest, int) and shortest > end) and not (isinstance(longest, int) and longest < end):
        found["maxLength"] = end
    _bound_numbers(found, places)
    return found


def _bound_numbers(schema: dict[str, Any], places: bool) -> None:
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    given = [schema[key] for key in BOUNDS[:4] if isinstance(schema.get(key), int | float)]
    numbers = "number" in kinds
    if "const" in schema or "enum" in schema or not (given if numbers else "integer" in kinds):
        return
    largest = LARGEST_NUMBER if numbers else LARGEST_INTEGER
    for end, exclusive, bound in (
        ("minimum", "exclusiveMinimum", -largest),
        ("maximum", "exclusiveMaximum", largest),
    ):
        if end not in schema and exclusive not in schema:
            schema[end] = bound
    if numbers and places and all(one == round(one, PLACES) for one in given):
        schema["multipleOf"] = 10.0**-PLACES


def without_patterns(schema: Any, left_out: Callable[[str], bool]) -> Any:
    """The schema without those regular expressions of texts and names."""
    if isinstance(schema, list):
        return [without_patterns(one, left_out) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    free = False  # any property may be there: which ones, cannot be told
    for key, value in schema.items():
        if key == "pattern" and isinstance(value, str) and left_out(value):
            continue
        if key in NAMED and isinstance(value, dict):
            names = [name for name in value if key != "patternProperties" or not left_out(name)]
            free = free or len(names) < len(value)
            value = {name: without_patterns(value[name], left_out) for name in names}
        elif key not in (*VALUES, "const", "enum"):
            value = without_patterns(value, left_out)
        found[key] = value
    if free:
        found.pop("additionalProperties", None)
    return found


def _check_exact(key: str, value: Any) -> None:
    if isinstance(value, list | dict):
        for one in value.values() if isinstance(value, dict) else value:
            _check_exact(key, one)
    elif isinstance(value, int) and abs(value) > EXACT:
        raise Unwritable(_inexact(key, value))


def _inexact(key: str, value: Any) -> str:
    shown = json.dumps(value)[:40]
    return f"the JSON schema's {key} has {shown}: numbers are exact up to {EXACT}, ask for a text instead"
