"""Stop strings and markers in streamed text."""

from __future__ import annotations

from collections.abc import Sequence


def partial_suffix(text: str, words: Sequence[str]) -> int:
    """The length of the longest end of `text` with which one of `words` begins, the whole word excluded."""
    longest = 0
    for word in words:
        start = max(len(text) - len(word) + 1, 0)
        while (start := text.find(word[0], start)) >= 0:
            if word.startswith(text[start:]):
                longest = max(longest, len(text) - start)
                break
            start += 1
    return longest


class StopFinder:
    """Finds the stop string that is complete first; of two that end together, the longer.

    Text that comes while `off` is set is passed on as it is: a stop string may neither begin nor end in it.
    """

    __slots__ = ("found", "keep", "off", "_stops", "_held")

    def __init__(self, stops: Sequence[str], keep: bool):
        self.found: str | None = None
        self._stops = stops
        self.keep = keep  # the stop string itself is shown
        self.off = False
        self._held = ""

    @property
    def stops(self) -> Sequence[str]:
        """The texts that are looked for now."""
        return () if self.off else self._stops

    def feed(self, text: str) -> str:
        """The text that is certainly before any stop string."""
        if self.off:
            return text
        text = self._held + text
        best: tuple[int, int, str] | None = None
        for stop in self.stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        if best is not None:
            end, start, self.found = best
            self._held = ""
            return text[: end if self.keep else start]
        held = partial_suffix(text, self.stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held
