"""From a request's bytes to its struct: wrong JSON, wrong types and fields that nothing here obeys are refused."""

from __future__ import annotations

import json
import math
import re
from typing import Any, ClassVar, TypeVar

import msgspec

from . import unsupported
from .api_error import ApiError, bad
from .fields import allowed

HALF = re.compile("[\ud800-\udfff]")  # of two escapes that are one character
LOOKED_AT = 1 << 20  # bytes of a broken body, as the event loop waits for it
JSON_NAMES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}  # of types, as msgspec has them
MAX_DIGITS = 300  # of an integer that msgspec reads


class Body(msgspec.Struct, kw_only=True):
    """Base of all requests. None is "not given" everywhere. Unknown fields are ignored."""

    refused: ClassVar[dict[str, unsupported.Field]] = {}  # fields that would change the answer, and why they do not

    def check(self) -> None:
        """Everything that can be judged without the model. Raises ApiError 400."""


Kind = TypeVar("Kind", bound=Body)


def show(value: Any) -> str:
    """A value as JSON, cut to a line."""
    try:
        text = msgspec.json.encode(value).decode()
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def decode(body: bytes, kind: type[Kind], strict: bool = False) -> Kind:
    """A request's body; `strict` refuses fields that nothing here knows. Raises ApiError 400."""
    if not body.strip():
        raise ApiError(400, "the request has no body: send a JSON object")
    try:
        raw = msgspec.json.decode(body)
    except RecursionError:
        raise nested_too_deeply() from None
    except msgspec.DecodeError as error:
        raise _unreadable(body, error) from None
    except UnicodeDecodeError:
        raise ApiError(400, f"the request's body is not UTF-8, as JSON has to be: {not_utf8(body)}") from None
    if not isinstance(raw, dict):
        raise ApiError(400, f"the request's body is {show(raw)}: expected a JSON object")
    if strict and (
        unknown := [name for name in raw if name not in kind.__struct_fields__ and name not in kind.refused]
    ):
        name = unknown[0]
        raise bad(
            name, f"{name[:100]} is no field of this endpoint, and this server refuses such (--strict): leave it out"
        )
    try:
        return convert(raw, kind)
    except RecursionError:
        raise nested_too_deeply() from None


def _unreadable(body: bytes, error: Exception) -> ApiError:
    """Why a body cannot be read. msgspec does not tell in which field a text or number is that cannot be one."""
    whole = ApiError(400, f"the request's body is not valid JSON: {error}")
    if len(body) > LOOKED_AT:
        return whole
    try:
        raw = json.loads(body, parse_int=lambda digits: math.inf if len(digits) > MAX_DIGITS else 0)
    except (ValueError, RecursionError):
        return whole
    for name, value in raw.items() if isinstance(raw, dict) else ():
        if (why := _why_none(value)) and not HALF.search(name):  # else the answer could not be written either
            return bad(name[:100], f"{name[:100]} {why}")
    return whole


def _why_none(value: Any) -> str:
    """The part of a value that cannot be read; "" if there is none."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, list | dict):
            left += one.values() if isinstance(one, dict) else one
        elif isinstance(one, str) and (half := HALF.search(one)):
            return f"has \\u{ord(half[0]):x}, half of a surrogate pair: the text was cut within a character"
        elif isinstance(one, float) and not math.isfinite(one):
            return "has NaN, which JSON does not have" if math.isnan(one) else "has a number that is out of range"
    return ""


def nested_too_deeply() -> ApiError:
    return ApiError(400, "the request's body is nested too deeply")


def not_utf8(body: bytes) -> str:
    """The fault in a body or a line, and its position; msgspec's error counts from the beginning of a string."""
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        return f"{error.reason} 0x{body[error.start]:02x} (byte {error.start})"


def convert(raw: dict[str, Any], kind: type[Kind]) -> Kind:
    """A request from its JSON object; the ranges of all fields are checked."""
    if (found := unsupported.first(raw, kind.refused)) is not None:
        name, why = found
        raise bad(name, f"{name} is {show(raw[name])}: {why}")
    request = _converted(raw, kind)
    request.check()
    return request


def _converted(raw: dict[str, Any], kind: type[Kind]) -> Kind:
    """The struct. An integer may be written as 5.0, as JSON has one kind of number."""
    whole: set[str] = set()  # fields whose numbers were made integers
    while True:
        try:
            return msgspec.convert(raw, kind)
        except msgspec.ValidationError as error:
            found = re.search(r"Expected `[^`]*\bint\b[^`]*`, got `float` - at `\$\.(\w+)", str(error))
            if found is None or found[1] in whole:
                raise explain(str(error), raw, kind=kind) from None
            whole.add(found[1])
            raw = {**raw, found[1]: _whole(raw[found[1]])}


def _whole(value: Any) -> Any:
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 1 << 63 else value
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return {key: _whole(one) for key, one in value.items()} if isinstance(value, dict) else value


def explain(message: str, raw: Any, root: str = "", kind: type[msgspec.Struct] | None = None) -> ApiError:
    """msgspec's message with the field and its value put first. kind: the request, whose limits are named then."""
    missing = re.fullmatch(r"Object missing required field `(\w+)`(?: - at `\$\.?(.*)`)?", message)
    if missing:
        param = ".".join(filter(None, [root, missing[2], missing[1]]))
        return bad(param, f"{param} is missing")
    what, _, path = re.sub(r" - at `key` in ", " - at ", message).partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    if expected := _limit(what):
        path = re.sub(r"(\[(\d+|\.\.\.)\])+$", "", path)  # the list or object as a whole
        if kind is not None and path in kind.__struct_fields__:
            expected = allowed(kind, path) or expected
    value = raw
    for key in re.findall(r"\w+|\.\.\.", path):
        try:
            value = value[int(key)] if isinstance(value, list) else value[key]
        except (KeyError, IndexError, TypeError, ValueError):
            break  # `...` stands for some key of a mapping
    param = ".".join(filter(None, [root, path])) or "body"
    if expected:
        return bad(param, f"{param} is {show(value)}: {expected}")
    if what.startswith("Expected `"):
        what = re.sub(r"\w+", lambda found: JSON_NAMES.get(found[0], found[0]), what)
    return bad(param, f"{param} is {show(value)}: {what[:1].lower()}{what[1:]}")


SIDES = {">=": "at least", "<=": "at most"}
LENGTHS = {"str": ("text", "characters"), "array": ("list", "entries"), "object": ("object", "entries")}


def _limit(what: str) -> str:
    """The limit that a value breaks, as msgspec's message has it; "" if its type is wrong."""
    if found := re.fullmatch(r"Expected `\w+` ([<>]=) (\S+)", what):
        return f"a number of {SIDES[found[1]]} {found[2].removesuffix('.0')} is needed"
    if found := re.fullmatch(r"Expected `(\w+)` of length ([<>]=) (\d+)", what):
        kind, parts = LENGTHS[found[1]]
        size = "that is not empty" if found[3] == "1" else f"of {SIDES[found[2]]} {found[3]} {parts}"
        return f"a {kind} {size} is needed"
    if found := re.fullmatch(r"Expected `str` matching regex '(.*)'", what):
        return f"a text that matches {found[1]} is needed"
    return "another value is needed" if what.startswith("Invalid enum value") else ""
