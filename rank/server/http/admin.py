"""Endpoints of `--admin` for key holders: give its memory back for a while, and change the log's level."""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated, Literal

from ..api_error import ApiError, bad
from ..decoding import Body, show
from ..fields import doc
from ..sleeper import TAGS, Sleeper
from .routes import Call, Reply, Route

LEVELS = 1, 2  # of sleep
LogLevel = Literal["debug", "info", "warning", "error"]


class LogLevelRequest(Body, kw_only=True):
    """POST /admin/log-level."""

    level: Annotated[LogLevel, doc("the least that is logged")]


def _check(call: Call) -> Sleeper:
    """Raises ApiError 403 without --admin."""
    assert call.server is not None
    if not call.server.config.admin:
        raise ApiError(403, "key holders may not do this here: start the server with --admin", code="admin_off")
    return call.server.sleeper


async def sleep(call: Call) -> Reply:
    """Give the model's memory back until `/wake_up`, once open requests are finished. With `level=1` the weights stay
    in host memory, with 2 they are dropped."""
    sleeper = _check(call)
    level = call.query.get("level", "1")
    if level not in map(str, LEVELS):
        raise bad("level", f"level is {level[:20]!r}: expected 1 or 2")
    # Also where the client leaves meanwhile: half asleep is no state.
    await asyncio.shield(asyncio.ensure_future(sleeper.sleep(int(level))))
    return Reply(b"")


async def wake_up(call: Call) -> Reply:
    """Have the model again that sleeps; `tags=weights` brings back its weights only, `tags=kv_cache` the rest."""
    sleeper = _check(call)
    tags = call.repeated.get("tags", ())
    for tag in tags:
        if tag not in TAGS:
            raise bad("tags", f"tags is {show(tag)}: expected {' or '.join(TAGS)}")
    await asyncio.shield(asyncio.ensure_future(sleeper.wake_up(tags or TAGS)))
    return Reply(b"")


def is_sleeping(call: Call) -> dict[str, bool]:
    """Whether the model sleeps."""
    return {"is_sleeping": _check(call).sleeping}


def log_level(call: Call) -> dict[str, str]:
    """Log more, or less, in the server process from now on: `debug`, `info`, `warning` or `error`."""
    _check(call)
    request: LogLevelRequest = call.request
    logging.getLogger().setLevel(request.level.upper())
    logging.getLogger("phalanx.server").warning("the log's level is %s now", request.level)
    return {"level": request.level}


ROUTES = [
    Route("/sleep", sleep, media=()),
    Route("/wake_up", wake_up, media=()),
    Route("/is_sleeping", is_sleeping, method="GET"),
    Route("/admin/log-level", log_level, LogLevelRequest),
]
