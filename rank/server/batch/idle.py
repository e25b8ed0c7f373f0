"""Room for a server's batches: what live requests leave of the ranks' places, and of their time."""

from __future__ import annotations

import asyncio

from ..engine_client import EngineClient

LOOK_EVERY = 0.05  # seconds
SHARE = 0.75  # of the places, and of the KV cache's blocks: a live request finds room at once
FIRST = 4  # sequences, until it is known how long steps take
STEP = 0.05  # seconds; more sequences are begun while steps are shorter, so that live answers flow


class IdleRoom:
    """Admission for work of the lowest priority."""

    def __init__(self, link: EngineClient):
        self._link = link
        self._mine = 0  # sequences
        self._limit = FIRST
        self._steps = 0  # as the ranks have told last, and when that was
        self._told = 0.0

    async def take(self, count: int) -> int:
        """Wait until no other request needs the places. Returns how many were taken, to be given back."""
        while not self._has(count):
            await asyncio.sleep(LOOK_EVERY)
        self._mine += count
        return count

    def give(self, count: int) -> None:
        self._mine -= count

    def _has(self, count: int) -> bool:
        link = self._link
        if link.state != "ready" or link.ready is None:
            return False
        self._look()
        live = max(0, link.open_sequences - self._mine)
        if not self._mine and not live:
            return True  # also for a request that wants more than there is
        if link.stats.waiting or link.stats.blocks_used > SHARE * link.stats.blocks_total:
            return False
        return live + self._mine + count <= min(self._limit, max(1, int(SHARE * link.ready.max_num_seqs)))

    def _look(self) -> None:
        """Twice as many sequences while steps are short, half as many where they are long."""
        steps, now = self._link.stats.steps, asyncio.get_running_loop().time()
        if steps == self._steps:
            return
        seconds = (now - self._told) / (steps - self._steps) if steps > self._steps else 0.0
        if 2 * self._mine > self._limit and 0 < seconds < STEP:
            self._limit *= 2
        elif seconds > 2 * STEP:
            self._limit = max(FIRST, self._limit // 2)
        self._steps, self._told = steps, now
