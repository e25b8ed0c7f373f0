"""Which replica a request goes to: where most of its prompt is computed already, unless that one has too much to do."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from .. import protocol
from .blocks import Hash, extend_chain
from .replica import Replica

# What an open sequence adds to its replica's load, in tokens of prompt that take as long: each of its tokens makes a
# step a little longer, and there are hundreds to come.
OPEN_SEQUENCE = 64
REMEMBERED = 1 << 16  # blocks of prompts that were sent somewhere and may not be computed yet


class Router:
    def __init__(self, replicas: Sequence[Replica]):
        self.replicas = replicas
        self._sent: OrderedDict[Hash, int] = OrderedDict()  # block -> replica, least recently used first

    def add(self, request: protocol.Request) -> None:
        """Hand the request to a replica. Raises ValueError as Scheduler.add does."""
        if len(self.replicas) == 1:
            return self.replicas[0].scheduler.add(request)
        blocks = self.replicas[0].scheduler.blocks
        tokens = protocol.unpack_u32(request.tokens)
        hashes: list[Hash] = []
        if blocks.prefix_cache:
            extend_chain(hashes, tokens, blocks.size, request.cache_salt)
        known = [self._known(i, hashes) for i in range(len(self.replicas))]
        loads = [replica.scheduler.backlog + OPEN_SEQUENCE * replica.scheduler.open for replica in self.replicas]
        chosen = min(range(len(self.replicas)), key=lambda i: loads[i] - known[i])
        self.replicas[chosen].scheduler.add(request, hashes, known[chosen])
        for digest in hashes:
            self._sent[digest] = chosen
            self._sent.move_to_end(digest)
        while len(self._sent) > REMEMBERED:
            self._sent.popitem(last=False)

    def _known(self, index: int, hashes: list[Hash]) -> int:
        """How many tokens of the prompt this replica has computed, or will have when it comes to this one."""
        blocks = self.replicas[index].scheduler.blocks
        known = len(blocks.match(hashes))
        while known < len(hashes) and self._sent.get(hashes[known]) == index:
            known += 1
        return known * blocks.size
