"""Rank 0's account of the images whose features a replica's ranks hold, and of the tower's work on those they lack."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from ..protocol import Picture
from .sequence import Sequence
from .step import PlannedStep


class ImageStore:
    """The images that the ranks were sent, least recently used first. The ranks keep what rank 0 does not drop.

    The tower works on one image at a time, and before a step on as much of it as the step's budget of tokens allows.
    """

    def __init__(self, memory: int = 0, token_bytes: int = 1, pieces: int = 1, pixel: float = 0.0, pair: float = 0.0):
        """memory: bytes of features that are kept for later requests. The rest as worker.engine.ImageCosts has it."""
        self._memory, self._token_bytes = memory, token_bytes
        self._pieces, self._pixel, self._pair = pieces, pixel, pair
        self._held: OrderedDict[bytes, int] = OrderedDict()  # bytes of features, by digest
        self._bytes = 0
        self._current = b""  # the image that the tower is working on,
        self._left, self._cost = 0, 0.0  # how many pieces are left, and how many tokens take as long as each

    def lacking(self, sequence: Sequence, computed: int) -> list[Picture]:
        """The images whose features are not there and that a sequence needs behind its first `computed` tokens."""
        found = []
        for picture in sequence.pictures:
            if picture.start + picture.length <= computed:
                continue
            if picture.digest in self._held:
                self._held.move_to_end(picture.digest)
            if picture.digest not in self._held or (self._left and picture.digest == self._current):
                found.append(picture)
        return found

    def work(
        self, sequence: Sequence, lacking: list[Picture], users: Iterable[Sequence], budget: int, step: PlannedStep
    ) -> int:
        """Have the tower work on these images of a sequence before a step, for about as long as `budget` tokens take,
        at least on a layer. Returns how many tokens that are.

        users: sequences whose images stay, this one included. What another one left behind is finished first.
        """
        new = iter({one.digest: one for one in lacking if one.digest not in self._held}.values())
        spent, used = 0.0, set[bytes]()
        while spent < budget:
            if not self._left:
                picture = next(new, None)
                if picture is None:
                    break
                size, dropped = picture.rows * picture.columns * self._token_bytes, list[bytes]()
                if self._bytes + size > self._memory:
                    used = used or {picture.digest for one in users for picture in one.pictures}
                    dropped = self._make_room(size, used | step.images)
                sequence.towered += 1
                self._held[picture.digest] = size
                self._bytes += size
                image = sequence.pixels[picture.digest]
                step.pixels.append(msgspec.structs.replace(image, dropped=dropped))
                pixels = image.height * image.width
                self._current, self._left = image.digest, self._pieces
                self._cost = (pixels * self._pixel + pixels**2 * self._pair) / self._pieces
            pieces = self._left
            if self._cost:
                pieces = min(pieces, max(not spent, int((budget - spent) / self._cost)))
            if not pieces:
                break
            step.tower += pieces
            step.images.add(self._current)
            self._left -= pieces
            spent += pieces * self._cost
        return math.ceil(spent)

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
