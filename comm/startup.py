"""Startup progress of the ranks, from which the watchdog finds a rank that hangs before the first step.

Before it, ranks load, profile and capture, and wait for each other in between. Loading may take hours, so a time limit
alone cannot judge. The job is healthy as long as any rank makes progress, by a phase or by some bytes. Once no rank has
made progress for PATIENCE, the ranks that the others wait for are named.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import NamedTuple

PATIENCE = 600.0  # seconds in which a rank must progress: read a large tensor from a slow disk, or compile all kernels
PACKAGE = Path(__file__).parents[1]


class StartupState(NamedTuple):
    """Progress of a rank before its first step."""

    phase: int  # number; all ranks go through the same phases
    done: int  # progress within the phase: bytes, or another count
    name: str = ""  # of the phase, for messages
    place: str = ""  # file and function

    @property
    def waits(self) -> bool:
        """Whether the rank is in a collective."""
        return self.place.startswith("comm/")

    def __str__(self) -> str:
        return f"{self.name} ({self.place})" if self.place else self.name


class StartupProgress:
    """One rank's startup progress: written by the threads that prepare it, read by the watchdog's thread."""

    def __init__(self) -> None:
        self._now = 0, "starting", threading.get_ident()
        self._done = 0

    def begin(self, phase: str) -> None:
        number, *_ = self._now
        self._now = number + 1, phase, threading.get_ident()
        self._done = 0

    def reached(self, done: int) -> None:
        self._done = done

    def look(self) -> StartupState:
        number, name, thread = self._now
        return StartupState(number, self._done, name, place(thread))


def place(thread: int) -> str:
    """The innermost file and function of this package on a thread's stack; "" where there is none."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(PACKAGE):
            return f"{file.relative_to(PACKAGE)}: {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def laggards(ranks: dict[int, StartupState]) -> list[int]:
    """The ranks that hold the others up: those in the earliest phase that are not waiting in a collective."""
    first = min(doing.phase for doing in ranks.values())
    behind = [rank for rank, doing in ranks.items() if doing.phase == first]
    return [rank for rank in behind if not ranks[rank].waits] or behind


class StallTimer:
    """Measures how long a value that should change has stayed the same."""

    def __init__(self, limit: float):
        self.limit = limit
        self._seen: object = None
        self._since = 0.0

    def lasts(self, now: float, seen: object) -> bool:
        """Whether the value has been `seen` for longer than the limit. None: nothing is expected to change."""
        if seen is None or seen != self._seen:
            self._seen, self._since = seen, now
            return False
        return now - self._since > self.limit

    def forgive(self, now: float) -> None:
        """Start measuring again from `now`."""
        self._since = now
