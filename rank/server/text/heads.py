"""A regular expression for the beginning of a text that is still being written."""

from __future__ import annotations

import re

NAME = r"(?P<name>[\w.:/-]{1,128})"  # of a function


class Head:
    """Matches at the beginning of a text, and tests whether a text may still become a match.

    The pattern has to be bounded, so that a head that never ends is not read again and again, and more text must not
    change what it matches. Each of `examples` is a text that it matches; whatever may become a match does so with the
    end of one of them.
    """

    def __init__(self, pattern: str, *examples: str):
        self._pattern = re.compile(pattern)
        self._ends = tuple({example[i:]: None for example in examples for i in range(len(example))})
        assert all(map(self._pattern.match, examples)), pattern

    def match(self, text: str) -> re.Match[str] | None:
        return self._pattern.match(text)

    def may_come(self, text: str) -> bool:
        return any(self._pattern.match(text + end) for end in self._ends)
