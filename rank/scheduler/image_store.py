"""Rank 0's account of the images whose features a replica's ranks hold, and of the tower's work on those they lack."""

from __future__ import annotations

import functools
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import msgspec

from ..protocol import Picture
from .sequence import Sequence
from .step import PlannedStep


@dataclass(slots=True)
class Work:
    """A rank's work on an image."""

    digest: bytes = b""
    left: int = 0  # parts that no plan has yet
    cost: float = 0.0  # tokens that take as long as each


class ImageStore:
    """The images that the ranks were sent, least recently used first. The ranks keep what rank 0 does not drop.

    Each rank of the first pipeline stage has a whole tower, which works on one image at a time, and before a step on as
    much of it as the step's budget of tokens allows. Several images are shared out over the ranks.
    """

    def __init__(
        self, memory: int = 0, token_bytes: int = 1, pieces: int = 1, pixel: float = 0.0, pair: float = 0.0,
        ranks: int = 1,
    ):  # fmt: skip
        """memory: bytes of features that are kept for later requests. The rest as worker.engine.ImageCosts has it."""
        self._memory, self._token_bytes = memory, token_bytes
        self._pieces, self._pixel, self._pair, self.ranks = pieces, pixel, pair, ranks
        self._held: OrderedDict[bytes, int] = OrderedDict()  # bytes of features, by digest
        self._bytes = 0
        self._work = [Work() for _ in range(ranks)]

    def lacking(self, sequence: Sequence, computed: int) -> list[Picture]:
        """The images whose features are not there and that a sequence needs behind its first `computed` tokens."""
        found, unfinished = [], self._unfinished()
        for picture in sequence.pictures:
            if picture.start + picture.length <= computed:
                continue
            if picture.digest in self._held:
                self._held.move_to_end(picture.digest)
            if picture.digest not in self._held or picture.digest in unfinished:
                found.append(picture)
        return found

    def _unfinished(self) -> set[bytes]:
        return {one.digest for one in self._work if one.left}

    def work(
        self, sequence: Sequence, lacking: list[Picture], later: Iterator[tuple[Sequence, Picture]],
        users: Iterable[Sequence], budget: int, step: PlannedStep,
    ) -> int:  # fmt: skip
        """Have the towers work on these images of a sequence before a step, for about as long as `budget` tokens take,
        at least on a layer in each step. Returns how many tokens that are.

        later: images that other sequences lack, for ranks that would wait meanwhile. users: sequences whose images
        stay. What another one left behind is finished before a rank begins anew.
        """
        step.tower = step.tower or [0] * self.ranks
        new = deque({one.digest: (sequence, one) for one in lacking if one.digest not in self._held}.values())
        own, spent, able = {one.digest for one in lacking}, [0.0] * self.ranks, {*range(self.ranks)}
        used = functools.cache(lambda: {picture.digest for user in users for picture in user.pictures})

        def foreign(rank: int) -> bool:
            return self._work[rank].left > 0 and self._work[rank].digest not in own

        while able:
            rank = min(able, key=lambda rank: (spent[rank], foreign(rank), rank))
            if spent[rank] >= budget or not (new or (self._work[rank].left and not foreign(rank))):
                able.remove(rank)
                continue
            if not self._work[rank].left:
                self._begin(rank, *new.popleft(), used, step)
            if not self._advance(rank, budget, spent, step, at_least=not step.tower[rank]):
                able.remove(rank)
        longest = max(spent)
        for rank in range(self.ranks):
            while spent[rank] < longest:
                if not self._work[rank].left:
                    wanted = next((one for one in later if one[1].digest not in self._held), None)
                    if wanted is None:
                        break
                    self._begin(rank, *wanted, used, step)
                if not self._advance(rank, longest, spent, step):
                    break
        return math.ceil(longest)

    def _begin(
        self, rank: int, sequence: Sequence, picture: Picture, used: Callable[[], set[bytes]], step: PlannedStep
    ) -> None:
        """Send a rank an image that no rank has begun with. used: digests of images that stay."""
        image = sequence.pixels[picture.digest]
        size, dropped = picture.rows * picture.columns * self._token_bytes, list[bytes]()
        if self._bytes + size > self._memory:
            dropped = self._make_room(size, used() | step.images | self._unfinished())
        sequence.towered += 1
        self._held[image.digest] = size
        self._bytes += size
        step.pixels.append(msgspec.structs.replace(image, dropped=dropped, rank=rank - self.ranks))
        pixels = image.height * image.width
        self._work[rank] = Work(
            image.digest, self._pieces, (pixels * self._pixel + pixels**2 * self._pair) / self._pieces
        )

    def _advance(self, rank: int, limit: float, spent: list[float], step: PlannedStep, at_least: int = 0) -> int:
        """Have a rank go on with its image until it has spent `limit` tokens. Returns how many parts it computes."""
        at = self._work[rank]
        pieces = at.left
        if at.cost:
            pieces = min(pieces, max(at_least, int((limit - spent[rank]) / at.cost + 1e-9)))
        if pieces:
            step.tower[rank] += pieces
            step.images.add(at.digest)
            at.left -= pieces
            spent[rank] += pieces * at.cost
        return pieces

    def _make_room(self, size: int, used: set[bytes]) -> list[bytes]:
        """Forget images that are not used until there is memory for so many bytes, as far as possible. There may be
        tens of thousands, so only the first are looked at."""
        dropped = []
        for digest, held in self._held.items():
            if self._bytes + size <= self._memory:
                break
            if digest not in used:
                dropped.append(digest)
                self._bytes -= held
        for digest in dropped:
            del self._held[digest]
        return dropped
