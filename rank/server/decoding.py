"""From a request's bytes to its struct: wrong JSON, wrong types and fields that nothing here obeys are refused."""

from __future__ import annotations

import json
import math
import re
from typing import Any, ClassVar, TypeVar

import msgspec

from . import unsupported
from .api_error import ApiError, bad

HALF = re.compile("[\ud800-\udfff]")  # of two escapes that are one character
LOOKED_AT = 1 << 20  # bytes of a broken body, as the event loop waits for it
MOST_DIGITS = 300  # of an integer that msgspec reads


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
        raw = json.loads(body, parse_int=lambda digits: math.inf if len(digits) > MOST_DIGITS else 0)
    except (ValueError, RecursionError):
        return whole
    for name, value in raw.items() if isinstance(raw, dict) else ():
        if (why := _why_none(value)) and not HALF.search(name):  # else the answer could not be written either
            return bad(name[:100], f"{name[:100]} {why}")
    return whole


def _why_none(value: Any) -> str:
    """What a value has that cannot be read; "" for nothing."""
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
    """What is wrong in a body or a line, and where; msgspec's error counts from the beginning of a string."""
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        return f"{error.reason} 0x{body[error.start]:02x} (byte {error.start})"


def convert(raw: dict[str, Any], kind: type[Kind]) -> Kind:
    """A request from its JSON object; the ranges of all fields are checked."""
    if (found := unsupported.first(raw, kind.refused)) is not None:
        name, why = found
        raise bad(name, f"{name} is {show(raw[name])}: {why}")
    try:
        request = msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise explain(str(error), raw) from None
    request.check()
    return request


def explain(message: str, raw: Any, root: str = "") -> ApiError:
    """msgspec's message with the field and its value put first."""
    missing = re.fullmatch(r"Object missing required field `(\w+)`(?: - at `\$\.?(.*)`)?", message)
    if missing:
        param = ".".join(filter(None, [root, missing[2], missing[1]]))
        return bad(param, f"{param} is missing")
    what, _, path = message.partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    value = raw
    for key in re.findall(r"\w+|\.\.\.", path):
        try:
            value = value[int(key)] if isinstance(value, list) else value[key]
        except (KeyError, IndexError, TypeError, ValueError):
            break  # `...` stands for some key of a mapping
    param = ".".join(filter(None, [root, path])) or "body"
    return bad(param, f"{param} is {show(value)}: {what[:1].lower()}{what[1:]}")
