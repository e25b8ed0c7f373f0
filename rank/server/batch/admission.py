"""Room for sequences in flight. The library and batch jobs hold back here what the ranks cannot take yet."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol


class Request(Protocol):
    """A request as admission and deadline see it."""

    priority: int | None

    def sequences(self) -> int:
        """How many it will be."""

    def limit(self) -> int | None:
        """The max_tokens of each, where the request limits them."""


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


def enough(max_num_seqs: int) -> int:
    """Places that keep the ranks busy: what runs, and what is at hand when one of those ends."""
    return 2 * max_num_seqs
