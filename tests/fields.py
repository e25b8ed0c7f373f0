"""One field of many objects, for tests that compare it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def each(objects: Iterable[dict[str, Any]], name: str) -> list[Any]:
    return [one[name] for one in objects]


def joined(parts: Iterable[str | None]) -> str:
    """The text of a stream, some of whose parts have none."""
    return "".join(part or "" for part in parts)
