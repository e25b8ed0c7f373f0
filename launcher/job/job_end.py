"""When a job will be ended: by its batch system, or by an option."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import datetime

from ...errors import USAGE, FatalError
from . import mpi_env

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


def end_time(
    text: str, environ: Mapping[str, str] | os._Environ[str], now: float, flag: str = "--deadline"
) -> tuple[float, float]:
    """When the job will be ended, as Unix time, and in how many seconds; (0, 0) where nothing ends it.

    text: the value of `flag`, "" where that is not given.
    """
    end = mpi_env.end_time(environ)
    if text == "none" or not (text or end):
        return 0.0, 0.0
    name = "SLURM_JOB_END_TIME"
    if text:
        name, end = f"{flag} {text}", _time(text, now, flag)
    if end <= now:
        raise FatalError(f"{name} is over already", USAGE)
    return end, end - now


def _time(text: str, now: float, flag: str) -> float:
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text):
        number = float(found[1]) * _UNITS[found[2]]
        return number if number > 1e9 else now + number  # so large it is no duration but Unix time
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise FatalError(
            f"{flag} {text!r}: seconds from now (90, 30m, 4h), a time such as 2026-11-20T18:00, or none is needed",
            USAGE,
        ) from None
