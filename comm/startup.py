"""How far the ranks are before their first step: they load, measure and capture, and wait for each other in between.

Loading may take hours, so time alone tells nothing. As long as any rank gets on, by a phase or by some bytes, all is
well. Once nobody has for a long time, whoever has not come to where the others wait is to blame.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import NamedTuple

PATIENCE = 600.0  # seconds in which some rank must get on: one large tensor from a slow disk, or all kernels compiled
PACKAGE = Path(__file__).parents[1]


class Doing(NamedTuple):
    """What a rank does before its first step."""

    phase: int  # all ranks go through the same ones
    done: int  # of it: bytes, or whatever is counted there
    name: str = ""  # of the phase
    place: str = ""  # in the program

    @property
    def waits(self) -> bool:
        """It is in a collective."""
        return self.place.startswith("comm/")

    def __str__(self) -> str:
        return f"{self.name} ({self.place})" if self.place else self.name


class Start:
    """One rank's way to its first step, told by the threads that prepare it and looked at by the watch's."""

    def __init__(self) -> None:
        self._now = 0, "starting", threading.get_ident()
        self._done = 0

    def begin(self, phase: str) -> None:
        number, *_ = self._now
        self._now = number + 1, phase, threading.get_ident()
        self._done = 0

    def reached(self, done: int) -> None:
        self._done = done

    def look(self) -> Doing:
        number, name, thread = self._now
        return Doing(number, self._done, name, place(thread))


def place(thread: int) -> str:
    """The file and function of this package that a thread is in; "" where it is in none."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(PACKAGE):
            return f"{file.relative_to(PACKAGE)}: {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def laggards(ranks: dict[int, Doing]) -> list[int]:
    """Who holds the others up, of the ranks that have not started yet: in the first phase, and not in a collective."""
    first = min(doing.phase for doing in ranks.values())
    behind = [rank for rank, doing in ranks.items() if doing.phase == first]
    return [rank for rank in behind if not ranks[rank].waits] or behind


class Unmoved:
    """How long what should change has stayed the same."""

    def __init__(self, limit: float):
        self.limit = limit
        self._seen: object = None
        self._since = 0.0

    def lasts(self, now: float, seen: object) -> bool:
        """Whether it has been `seen` for longer than the limit. None: there is nothing that should change."""
        if seen is None or seen != self._seen:
            self._seen, self._since = seen, now
            return False
        return now - self._since > self.limit

    def forgive(self, now: float) -> None:
        """The time so far does not count."""
        self._since = now
