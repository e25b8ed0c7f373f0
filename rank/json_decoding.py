"""Decodes JSON of strangers, such as a model's or a user's files: every fault is a ValueError that shows none of it.

The errors go on where the caller has named the file: "is not valid JSON: it is nested too deeply".
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec

Kind = TypeVar("Kind")


def decode_object(data: bytes) -> dict[str, Any]:
    """The object of a JSON text. NaN and Infinity are read, as Python's `json` writes them. Raises ValueError."""
    try:
        value = json.loads(data.decode("utf-8"))
    except RecursionError:
        raise ValueError("is not valid JSON: it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"is not valid JSON: byte {error.start} is not UTF-8") from None
    except ValueError as error:
        raise ValueError(f"is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"holds a JSON {type(value).__name__}, not an object")
    return value


def decode_as(data: bytes | msgspec.Raw, kind: type[Kind]) -> Kind:
    """The value of a JSON text, checked before it becomes objects, which take ten times its memory.

    Raises ValueError.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        raise ValueError("is not valid JSON: it is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("is not valid JSON: it is not UTF-8") from None
    except msgspec.DecodeError as error:
        raise ValueError(f"is not valid JSON of its kind: {error}") from None
