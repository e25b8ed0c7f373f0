"""Progress for the user: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

import msgspec
from tqdm import tqdm  # type: ignore[import-untyped]

from ....logs import say


class Counts(msgspec.Struct):
    """Counts of requests and their tokens."""

    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def done(self) -> int:
        return self.answered + self.failed


def duration(seconds: float) -> str:
    """4 s, 12 min, 3 h 05 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"


class Progress:
    """`total` and `before` are set when they are known: lines of the input, and those an earlier start did."""

    def __init__(self, columns: int, interval: float):
        self.total = 0
        self.before = 0
        self._interval = interval
        self._start = self._told = self._looked = time.monotonic()
        self._seen = 0.0
        self._speed = 0.0
        self._bar: Any = None
        if columns:
            tqdm.monitor_interval = 0  # no thread: `look` comes every second
            form = "{desc} {percentage:3.0f}%|{bar}| {n_fmt} of {total_fmt} requests{postfix}"
            self._bar = tqdm(total=0, ncols=columns, file=sys.stderr, bar_format=form, desc="loading", leave=True)

    def began(self) -> None:
        """The first request is on its way: rates count from here."""
        self._start = self._looked = time.monotonic()
        if self._bar is not None:
            self._bar.set_description_str("phalanx")

    def look(self, done: int, tokens: int, last: bool = False) -> None:
        """`done` requests and `tokens` of output, those under way included, by this start so far."""
        now = time.monotonic()
        passed = now - self._looked
        if passed > 0.5:
            fresh = max(0, tokens - self._seen) / passed
            self._speed = fresh if not self._speed else 0.8 * self._speed + 0.2 * fresh
            self._looked, self._seen = now, tokens
        words = f", {self._speed:.0f} tokens/s" + self._left(done, now)
        if self._bar is not None:
            self._bar.total = max(self.total, self.before + done)
            self._bar.n = self.before + done
            self._bar.set_postfix_str(words.removeprefix(", "), refresh=False)
            with contextlib.suppress(OSError):  # nobody reads it any more
                self._bar.refresh()
        elif not last and now - self._told >= self._interval:
            self._told = now
            of = f" of {self.total}" if self.total else ""
            self.say(f"{self.before + done}{of} requests{words}")

    def _left(self, done: int, now: float) -> str:
        remaining = self.total - self.before - done
        if not done or remaining <= 0:
            return ""
        return f", {duration((now - self._start) * remaining / done)} left"

    def say(self, text: str) -> None:
        """A line that does not disturb the bar."""
        with contextlib.suppress(OSError):
            if self._bar is not None:
                self._bar.clear()
        say(text)

    def close(self) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.close()
            self._bar = None
