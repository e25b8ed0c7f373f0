"""How a session's events become an endpoint's answer: whole, or as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from .api_error import ApiError
from .session import Session


def sse(name: str, /, **fields: Any) -> bytes:
    """One event: its name and its data, whose type is the name again."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode({"type": name, **fields}))


class Renderer:
    """The answer of one endpoint to one request. Its constructor takes the session, the request and the tokenizer."""

    def __init__(self, session: Session):
        self.session = session

    async def collect(self) -> dict[str, Any]:
        """Wait for all choices; the whole answer."""
        raise NotImplementedError

    def stream(self) -> AsyncIterator[bytes]:
        """The server-sent events, as many at once as there are."""
        raise NotImplementedError

    def close(self) -> None:
        """Nobody reads on: what is not finished is given up."""
        self.session.close()

    def error(self, error: ApiError) -> bytes:
        """The event for an error after the first event. It is the last one."""
        return b"data: " + msgspec.json.encode(error.body()) + b"\n\n"
