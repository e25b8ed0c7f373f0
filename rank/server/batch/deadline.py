"""How fast requests are answered here, measured; and so what still fits into the time that is left."""

from __future__ import annotations

import time
from collections import deque

from ..session import Session

REMEMBERED = 512  # requests
MEANINGFUL = 8  # before so many have ended, their lengths say little
CAUTION = 1.2  # of an estimate


class Deadline:
    """`end` is the Unix time at which nothing may run any more; infinite where there is no such time.

    The batch system ends the job by that clock, which may be set while the job runs.
    """

    def __init__(self, end: float = float("inf")):
        self.end = end
        self.output_tokens = self.finished = 0
        self._lengths: deque[int] = deque(maxlen=REMEMBERED)  # of sequences that have ended
        self._waits: deque[float] = deque(maxlen=REMEMBERED)  # seconds to the first token
        self._steps: deque[float] = deque(maxlen=REMEMBERED)  # and for each that followed

    def add(self, session: Session) -> None:
        """Learn from a session that has ended."""
        longest = max(choice.completion_tokens for choice in session.choices)
        self._lengths.append(longest)
        self._waits.append(session.first_token - session.start)
        if longest > 1:
            self._steps.append((session.last_token - session.first_token) / (longest - 1))

    def add_embedding(self, seconds: float) -> None:
        """Learn from a request that generated nothing."""
        self._lengths.append(0)
        self._waits.append(seconds)

    def seconds(self, limit: int | None) -> float:
        """How long a request of at most `limit` tokens takes, rather too much than too little. 0: nothing is known."""
        if not self._waits:
            return 0.0
        likely = _high(self._lengths)
        if limit is not None and (len(self._lengths) < MEANINGFUL or limit < likely):
            likely = limit
        return CAUTION * (_high(self._waits) + likely * (_high(self._steps) if self._steps else 0.0))

    def fits(self, limit: int | None) -> bool:
        """Whether a request that is begun now will be done in time."""
        return time.time() + self.seconds(limit) < self.end


def _high(values: deque) -> float:
    """The value that nine of ten do not exceed."""
    return sorted(values)[(len(values) * 9) // 10]
