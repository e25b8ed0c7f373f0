"""The text `input` out of a call's arguments while they are still being written: what clients see of custom tools."""

from __future__ import annotations

import json
import re

from .heads import Head

HEAD = Head(r'\s{0,32}\{\s{0,32}"input"\s{0,32}:\s{0,32}"', '{"input":"')
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
PIECE = re.compile(r'([^"\\]+)|\\u([0-9a-fA-F]{4})|\\([^u])|(")', re.DOTALL)


class InputText:
    """Reads the JSON of the arguments. What is no object with an input is the input as a whole."""

    def __init__(self) -> None:
        self._held = ""
        self._begun = self._over = False
        self._other = False  # the arguments are something else
        self._high = ""  # the first half of a pair of escapes

    def feed(self, text: str) -> str:
        """More of the JSON; returns more of the input."""
        self._held += text
        if self._over:
            self._held = ""
            return ""
        if not self._begun:
            if self._other or (head := HEAD.match(self._held)) is None:
                self._other = self._other or not HEAD.may_come(self._held)
                return ""
            self._begun, self._held = True, self._held[head.end() :]
        return self._read()

    def _read(self) -> str:
        found, at = "", 0
        while not self._over and (piece := PIECE.match(self._held, at)) is not None:
            plain, code, escape, end = piece.groups()
            at = piece.end()
            found += self._unit(int(code, 16)) if code else self._lone() + (plain or ESCAPES.get(escape, escape) or "")
            self._over = end is not None
        self._held = "" if self._over else self._held[at:]
        return found

    def _unit(self, code: int) -> str:
        """A code unit of UTF-16."""
        if 0xDC00 <= code < 0xE000 and self._high:
            high, self._high = ord(self._high), ""
            return chr(0x10000 + ((high - 0xD800) << 10) + code - 0xDC00)
        before = self._lone()
        if 0xD800 <= code < 0xDC00:
            self._high = chr(code)
            return before
        return before + ("\ufffd" if 0xDC00 <= code < 0xE000 else chr(code))

    def _lone(self) -> str:
        high, self._high = self._high, ""
        return "\ufffd" if high else ""

    def finish(self) -> str:
        """No more comes: the rest of the input."""
        if self._begun:
            return self._lone()
        try:
            given = json.loads(self._held)
        except (ValueError, RecursionError):
            return self._held
        if not isinstance(given, dict):
            return given if isinstance(given, str) else self._held
        values = [given["input"]] if "input" in given else list(given.values())
        return values[0] if len(values) == 1 and isinstance(values[0], str) else "" if not given else self._held
