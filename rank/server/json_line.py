"""JSON in one line by anybody's count: for server-sent events and JSON Lines files."""

from __future__ import annotations

from typing import Any

import msgspec

# Python's str.splitlines, and readers of streams that are built on it (httpx's iter_lines), end a line at these, too.
_ENDS = tuple((end.encode(), f"\\u{ord(end):04x}".encode()) for end in "\u0085\u2028\u2029")


def encode(value: Any) -> bytes:
    """UTF-8 JSON whose only characters that any reader takes for a line's end are escaped."""
    line = msgspec.json.encode(value)
    for end, escape in _ENDS:
        if end in line:
            line = line.replace(end, escape)
    return line
