"""Rank 0's account of the images whose features a replica's ranks hold, and of those that are to be sent to them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from ..protocol import Pixels
from .sequence import Sequence


class ImageStore:
    """The images that the ranks were sent, least recently used first. The ranks keep what rank 0 does not drop."""

    def __init__(self, memory: int = 0, token_bytes: int = 1):
        """memory: bytes of features that are kept for later requests. token_bytes: of an image token's features."""
        self._memory, self._token_bytes = memory, token_bytes
        self._held: OrderedDict[bytes, int] = OrderedDict()  # bytes of features, by digest
        self._bytes = 0

    def send(self, sequence: Sequence, running: Iterable[Sequence]) -> list[Pixels]:
        """The images that the ranks lack to compute what is left of a sequence's prompt. running: all sequences that
        have a row, this one included, whose images stay."""
        found, used = [], set[bytes]()
        for picture in sequence.pictures:
            if picture.start + picture.length <= sequence.num_computed:
                continue
            if picture.digest in self._held:
                self._held.move_to_end(picture.digest)
                continue
            size, dropped = picture.rows * picture.columns * self._token_bytes, list[bytes]()
            if self._bytes + size > self._memory:
                used = used or {picture.digest for one in running for picture in one.pictures}
                dropped = self._make_room(size, used)
            self._held[picture.digest] = size
            self._bytes += size
            image = sequence.pixels[picture.digest]
            found.append(Pixels(image.digest, image.height, image.width, image.data, dropped))
        return found

    def _make_room(self, size: int, used: set[bytes]) -> list[bytes]:
        """Forget images that no running sequence has until there is memory for so many bytes, as far as possible. There
        may be tens of thousands, so only the first are looked at."""
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
