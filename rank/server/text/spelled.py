"""Markers that a model spells with ordinary tokens, as it does where it speaks of them.

Where a model has a token of its own for a marker, that token alone is the marker. What other tokens spell gets MARK, so
that the output parser takes it for text; the parser removes MARK from what it passes on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ...vision import Spelling
from .control import MARK
from .stop_strings import partial_suffix


class SpelledMarkers:
    """A detokenizer that marks what only looks like one of the markers, given by their tokens."""

    def __init__(self, detokenizer: Spelling, markers: Mapping[int, str]):
        self._detokenizer = detokenizer
        self._tokens = markers.keys()
        self._markers = sorted(markers.values(), key=len, reverse=True)
        self._firsts = re.compile("|".join(map(re.escape, {marker[0] for marker in self._markers})))
        self._spelled = re.compile("|".join(map(re.escape, self._markers)))
        self._held = ""  # ordinary text that may become a marker

    def feed(self, token: int) -> str:
        text = self._detokenizer.feed(token)
        if token in self._tokens:
            return self._flush() + text
        if not self._held and not self._firsts.search(text):
            return text
        text = self._spelled.sub(lambda found: found[0][0] + MARK + found[0][1:], self._held + text)
        end = len(text) - partial_suffix(text, self._markers)
        self._held = text[end:]
        return text[:end]

    def _flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def finish(self) -> str:
        return self._flush() + self._detokenizer.finish()
