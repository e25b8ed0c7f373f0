"""Sends the server's figures to a collector, for sites where none may connect to compute nodes.

To a Pushgateway of Prometheus (https://github.com/prometheus/pushgateway), or to whatever takes its text format by PUT.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable

from .blocking import on_disk
from .config import PUSH_GROUP

log = logging.getLogger(__name__)
EVERY = 15.0  # seconds
PATIENCE = 10.0  # seconds for the collector to take them
TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricsPush:
    """Sends what `text` gives to `url` every EVERY seconds, and takes it away at the end from a group of its own."""

    def __init__(self, url: str, text: Callable[[], bytes]):
        parts = urllib.parse.urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        self._url = urllib.parse.urlunsplit(parts._replace(netloc=host))
        self._headers = {"Content-Type": TYPE}
        if parts.username is not None:
            given = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
            self._headers["Authorization"] = "Basic " + base64.b64encode(given.encode()).decode()
        self._text = text
        self._own = parts.path.startswith(PUSH_GROUP)  # another path may have other servers' figures
        self._failing = False

    async def run(self) -> None:
        """Send for ever."""
        while True:
            await self._send("PUT", self._text())
            await asyncio.sleep(EVERY)

    async def close(self) -> None:
        """A server that has ended has no figures: a Pushgateway would show the last ones for ever."""
        if self._own and not self._failing:
            await self._send("DELETE", None)

    async def _send(self, method: str, data: bytes | None) -> None:
        try:
            await on_disk(self._request, method, data)
        except (OSError, ValueError) as error:  # HTTPError is an OSError
            if not self._failing:
                log.warning("the figures cannot be sent to %s, which is tried again: %s", self._url, error)
            self._failing = True
        else:
            if self._failing:
                log.warning("the figures are sent to %s again", self._url)
            self._failing = False

    def _request(self, method: str, data: bytes | None) -> None:
        request = urllib.request.Request(self._url, data, self._headers, method=method)
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            answer.read(1 << 16)
