"""Lists that are read a page at a time, as OpenAI has them: `limit`, `order` and `after`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..api_error import bad


def page(items: Sequence[dict[str, Any]], query: Mapping[str, str], usual: int = 20, most: int = 100) -> dict[str, Any]:
    """The page that the query asks for. items: each with an id, the oldest first. Raises ApiError 400."""
    order, limit, after = query.get("order", "desc"), query.get("limit", str(usual)), query.get("after")
    if order not in ("asc", "desc"):
        raise bad("order", f"order is {order[:20]!r}: expected asc or desc")
    if not limit.isdecimal() or len(limit) > 9 or not 1 <= int(limit) <= most:
        raise bad("limit", f"limit is {limit[:20]!r}: it must be between 1 and {most}")
    items = items if order == "asc" else items[::-1]
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise bad("after", f"after is {after[:100]!r}: nothing in this list has this id")
        items = items[ids.index(after) + 1 :]
    data = list(items[: int(limit)])
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(items) > len(data),
    }
