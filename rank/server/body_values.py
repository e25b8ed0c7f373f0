"""Counts the values of a JSON body while it is bytes: 10 MB of [1],[1],... become 50 times their memory as objects."""

from __future__ import annotations

from .api_error import ApiError
from .schema import MAX_SEQUENCES

MAX_IDS = 1 << 20  # token ids of all prompts of a request, and some more where the context is long
PIECE = 1 << 16  # bytes that are counted together, as their pieces take memory


class BodyValues:
    """The values of a body that comes in parts."""

    def __init__(self) -> None:
        self._marks = self._lists = self._commas = 0
        self._within = False  # a text
        self._backslash = b""  # where a part ends with one that belongs to the next part's first byte

    def feed(self, part: bytes) -> None:
        """Count the next part's."""
        for at in range(0, len(part), PIECE):
            self._feed(part[at : at + PIECE])

    def _feed(self, part: bytes) -> None:
        part = self._backslash + part
        self._backslash = b"\\" * ((len(part) - len(part.rstrip(b"\\"))) % 2)
        if self._backslash:
            part = part[:-1]
        bare = part.replace(rb"\\", b"").replace(rb"\"", b"")  # the marks that are left begin and end texts
        pieces = bare.split(b'"')
        outside = b"".join(pieces[self._within :: 2])
        self._marks += len(pieces) - 1
        self._lists += outside.count(b"[") + outside.count(b"{")
        self._commas += outside.count(b",")
        self._within ^= len(pieces) % 2 == 0

    def check(self, context: int) -> None:
        """Refuse more values than any request needs. Raises ApiError 400.

        Each text, list and object of a chat is a token at least, nearly, so many of them could not be answered anyway.
        Ids of prompts are cheaper.
        """
        lists = 2 * (MAX_SEQUENCES + context)
        for kind, count, most in (
            ("texts", self._marks // 2, 4 * lists),
            ("lists and objects", self._lists, lists),
            ("values", self._commas, MAX_IDS + 4 * context),
        ):
            if count > most:
                raise ApiError(
                    400,
                    f"the request's body has {count} {kind} or more, but this model's context is {context} tokens, for "
                    f"which at most {most} are read; send less, or several requests",
                    code="context_length_exceeded",
                )
