"""Fields of JSON objects, for tests that compare one field of many objects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def each(objects: Iterable[dict[str, Any]], name: str) -> list[Any]:
    return [one[name] for one in objects]
