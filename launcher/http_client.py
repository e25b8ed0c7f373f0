"""HTTP to a server: what goes to this machine goes there directly, whatever http_proxy says."""

from __future__ import annotations

import urllib.parse
import urllib.request
from typing import Any

ALL = ("0.0.0.0", "::")
LOOPBACK = ("localhost", "::1", *ALL)


def is_loopback(host: str) -> bool:
    return host in LOOPBACK or host.startswith("127.")


def url_of(host: str, port: int) -> str:
    """Where a server that listens on `host` is reached from this machine."""
    host = "127.0.0.1" if host in ALL else host
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def open_url(request: urllib.request.Request, timeout: float | None = None, direct: bool = False) -> Any:
    """urlopen, but no proxy stands between a machine and itself: it would have its own idea of 127.0.0.1.

    Nor with `direct`: between the hosts of a cluster.
    """
    handlers = []
    if direct or is_loopback(urllib.parse.urlsplit(request.full_url).hostname or ""):
        handlers.append(urllib.request.ProxyHandler({}))
    return urllib.request.build_opener(*handlers).open(request, timeout=timeout)
