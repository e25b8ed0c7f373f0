"""How a session's events become an endpoint's answer: whole, or as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any, NamedTuple

from .. import protocol
from .api_error import ApiError
from .json_line import encode
from .session import Session

LOGPROB = 120  # bytes of a token's log probability in memory


def sse(name: str, /, **fields: Any) -> bytes:
    """One event: its name and its data, whose type is the name again."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), encode({"type": name, **fields}))


class LongEvent(NamedTuple):
    """An event with a long body that is kept elsewhere, too: it is written when it is sent."""

    name: str
    fields: dict[str, Any]


Event = bytes | LongEvent


def encoded(event: Event) -> bytes:
    """An event as it is sent."""
    return event if isinstance(event, bytes) else sse(event.name, **event.fields)


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

    def hold_logprobs(self, entries: Iterable[protocol.TokenLogprob]) -> None:
        """Count them until the answer is whole. Raises ApiError where there is no room."""
        size = sum(LOGPROB * (1 + len(one.top)) for one in entries)
        if size and not self.session.hold(size):
            raise ApiError(
                429,
                "the log probabilities of this API key's requests hold all the memory that they may: ask for fewer, or "
                "for a stream",
                code="busy",
                retry_after=1,
            )

    def error(self, error: ApiError) -> bytes:
        """The event for an error after the first event. It is the last one."""
        return b"data: " + encode(error.body()) + b"\n\n"
