"""Rank 0 reports loading progress: to the server, and to the user by a bar on a terminal or lines in the log."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from .. import protocol

TELL_EVERY, LOG_EVERY = 0.2, 3.0  # seconds between updates of server and bar, and between log lines
FORM = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}B of {total_fmt}B, {rate_fmt}, {remaining} left"

log = logging.getLogger("phalanx")


class Progress:
    """Progress of one phase. A phase shorter than TELL_EVERY draws no bar.

    columns: the width of stderr's terminal; 0 where it is none.
    """

    def __init__(self, phase: str, send: Callable[[object], None], columns: int):
        self._phase = phase
        self._send = send
        self._columns = columns
        self._start = self._told = self._logged = 0.0
        self._bar: Any = None

    def look(self, done: int, total: int) -> None:
        """Report bytes done and all bytes. The first call marks the phase's start."""
        now = time.monotonic()
        if not self._start:
            self._start = self._told = self._logged = now
        if now - self._told < TELL_EVERY and done < total:
            return
        self._told = now
        self._send(protocol.Progress(self._phase, done, total))
        if self._columns:
            self._draw(done, total)
        elif now - self._logged >= LOG_EVERY:
            self._logged = now
            speed = done / 1e9 / (now - self._start)
            log.info("%s: %.2f of %.2f GB, %.2f GB/s", self._phase, done / 1e9, total / 1e9, speed)

    def _draw(self, done: int, total: int) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            if self._bar is None and done < total:
                tqdm.monitor_interval = 0  # no thread
                self._bar = tqdm(total=total, desc=self._phase, unit="B", unit_scale=True, ncols=self._columns,
                                 file=sys.stderr, bar_format=FORM)  # fmt: skip
                self._bar.start_t -= time.monotonic() - self._start  # rates count from the phase's start
            if self._bar is not None:
                self._bar.n = done
                self._bar.refresh()
                if done >= total:
                    self._bar.close()
                    self._bar = None
