"""Lists that are read a page at a time, as OpenAI has them (`limit`, `order`, `after`) and as Anthropic has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..api_error import bad


def page(items: Sequence[dict[str, Any]], query: Mapping[str, str], usual: int = 20, most: int = 100) -> dict[str, Any]:
    """The page that the query asks for. items: each with an id, the oldest first. Raises ApiError 400."""
    order, limit = query.get("order", "desc"), _limit(query, usual, most)
    if order not in ("asc", "desc"):
        raise bad("order", f"order is {order[:20]!r}: expected asc or desc")
    items = items if order == "asc" else items[::-1]
    if "after" in query:
        items = items[_place(items, query, "after") + 1 :]
    return {"object": "list", **_shown(items, list(items[:limit]))}


def anthropic_page(items: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """The page that `limit`, `after_id` and `before_id` ask for. items: each with an id, as they are listed.

    Raises ApiError 400.
    """
    limit = _limit(query, 20, 1000)
    if "before_id" in query:
        items = items[: _place(items, query, "before_id")]
        return _shown(items, list(items[-limit:]))
    if "after_id" in query:
        items = items[_place(items, query, "after_id") + 1 :]
    return _shown(items, list(items[:limit]))


def _limit(query: Mapping[str, str], usual: int, most: int) -> int:
    limit = query.get("limit", str(usual))
    if not limit.isdecimal() or len(limit) > 9 or not 1 <= int(limit) <= most:
        raise bad("limit", f"limit is {limit[:20]!r}: it must be between 1 and {most}")
    return int(limit)


def _place(items: Sequence[dict[str, Any]], query: Mapping[str, str], name: str) -> int:
    """The position of the item that the query names."""
    ids = [item["id"] for item in items]
    if query[name] not in ids:
        raise bad(name, f"{name} is {query[name][:100]!r}: nothing in this list has this id")
    return ids.index(query[name])


def _shown(items: Sequence[dict[str, Any]], data: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(items) > len(data),
    }
