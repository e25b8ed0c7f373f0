"""Room for a server's batches: what live requests leave of the ranks' places."""

from __future__ import annotations

import asyncio

from ..engine_client import EngineClient

LOOK_EVERY = 0.05  # seconds
SHARE = 0.75  # of the places, and of the KV cache's blocks: a live request finds room at once


class IdleRoom:
    """As Admission, for one that always stands last."""

    def __init__(self, link: EngineClient):
        self._link = link
        self._mine = 0  # sequences

    async def take(self, count: int) -> int:
        """Wait until nobody else needs the places. Returns how many were taken, to be given back."""
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
        live = max(0, link.open_sequences - self._mine)
        if not self._mine and not live:
            return True  # also for a request that wants more than there is
        if link.stats.waiting or link.stats.blocks_used > SHARE * link.stats.blocks_total:
            return False
        return live + self._mine + count <= max(1, int(SHARE * link.ready.max_num_seqs))
