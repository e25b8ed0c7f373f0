"""Chooses a replica for each request: the one with the least work, less what its prefix cache has of the prompt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from .. import protocol
from .blocks import Hash, extend_chain
from .grammar import Grammar
from .replica import Replica

# The load that an open sequence adds to its replica, in prompt tokens that cost as much. Each of its coming hundreds of
# tokens makes a step a little longer.
OPEN_SEQUENCE = 64
REMEMBERED = 1 << 16  # prompt blocks whose replica is remembered, as they may not be computed yet


class Router:
    """Used by the step loop for every request. With one replica it only passes requests on."""

    def __init__(self, replicas: Sequence[Replica]):
        self.replicas = replicas
        self._sent: OrderedDict[Hash, int] = OrderedDict()  # block hash -> replica, least recently used first

    def add(self, request: protocol.Request, grammar: Grammar | None = None) -> None:
        """Add the request to a replica's scheduler. Raises ValueError as Scheduler.add does."""
        if len(self.replicas) == 1:
            return self.replicas[0].scheduler.add(request, grammar=grammar)
        blocks = self.replicas[0].scheduler.blocks
        tokens = protocol.unpack_u32(request.tokens)
        hashes: list[Hash] = []
        if blocks.prefix_cache:
            extend_chain(hashes, tokens, blocks.size, request.cache_salt, request.pictures)
        known = [self._known(i, hashes) for i in range(len(self.replicas))]
        loads = [replica.scheduler.backlog + OPEN_SEQUENCE * replica.scheduler.open for replica in self.replicas]
        chosen = min(range(len(self.replicas)), key=lambda i: loads[i] - known[i])
        self.replicas[chosen].scheduler.add(request, hashes, known[chosen], grammar)
        for digest in hashes:
            self._sent[digest] = chosen
            self._sent.move_to_end(digest)
        while len(self._sent) > REMEMBERED:
            self._sent.popitem(last=False)

    def _known(self, index: int, hashes: list[Hash]) -> int:
        """How many of the prompt's tokens this replica has in its prefix cache, or will have when it schedules the
        request."""
        blocks = self.replicas[index].scheduler.blocks
        known = blocks.snapshots.trim(blocks.match(hashes).matched, hashes)
        while known < len(hashes) and self._sent.get(hashes[known]) == index:
            known += 1
        return known * blocks.size
