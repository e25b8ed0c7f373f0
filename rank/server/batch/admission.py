"""Room for sequences in flight. The library and batch jobs hold back here what the ranks cannot take yet."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from ..schema import ChatRequest, CompletionRequest, EmbeddingRequest
from ..session import Session
from ..text_engine import TextEngine


class Admission:
    """`places` sequences at once; who wants some waits in line. A request for more than there are waits for all."""

    def __init__(self, places: int):
        self.places = places
        self.free = places
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, count: int) -> int:
        """Returns how many were taken, to be given back."""
        count = min(count, self.places)
        if not self._line and count <= self.free:
            self.free -= count
            return count
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append((count, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(count)  # it came in the same moment
            else:
                self._line = deque(one for one in self._line if one[1] is not turn)
                self._serve()
            raise
        return count

    def give(self, count: int) -> None:
        self.free += count
        self._serve()

    def _serve(self) -> None:
        while self._line and self._line[0][0] <= self.free:
            count, turn = self._line.popleft()
            if not turn.done():
                self.free -= count
                turn.set_result(None)


def sequences(request: ChatRequest | CompletionRequest | EmbeddingRequest) -> int:
    """How many sequences the request will be."""
    if isinstance(request, EmbeddingRequest):
        return len(request.prompts())
    prompts = len(request.prompts()) if isinstance(request, CompletionRequest) else 1
    return prompts * (request.n or 1)


def enough(max_num_seqs: int) -> int:
    """Places that keep the ranks busy: what runs, and what is at hand when one of those ends."""
    return 2 * max_num_seqs


@contextlib.asynccontextmanager
async def opened(sessions: TextEngine, request: ChatRequest | CompletionRequest) -> AsyncIterator[Session]:
    """The request's session; leaving ends what still runs."""
    if isinstance(request, ChatRequest):
        session = await sessions.chat(request)
    else:
        session = await sessions.completion(request)
    try:
        yield session
    finally:
        session.close()
