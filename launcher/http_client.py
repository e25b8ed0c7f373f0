"""HTTP to a server: what goes to this machine goes there directly, whatever http_proxy is."""

from __future__ import annotations

import functools
import http.client
import socket
import urllib.parse
import urllib.request
from typing import Any

from ..rank.server import tls

ALL = ("0.0.0.0", "::")
LOOPBACK = ("localhost", "::1", *ALL)


def is_loopback(host: str) -> bool:
    return host in LOOPBACK or host.startswith("127.")


def url_of(host: str, port: int) -> str:
    """The address of a server that listens on `host`, from this machine."""
    host = "127.0.0.1" if host in ALL else host
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def open_url(request: urllib.request.Request, timeout: float | None = None, *, direct: bool, certificate: str) -> Any:
    """urlopen, but no proxy stands between a machine and itself: it would have its own idea of 127.0.0.1.

    Nor with `direct`: between the hosts of a cluster. certificate: of the server, PEM, where the client has it already.
    """
    handlers: list[urllib.request.BaseHandler] = []
    if direct or is_loopback(urllib.parse.urlsplit(request.full_url).hostname or ""):
        handlers.append(urllib.request.ProxyHandler({}))
    if request.type == "https":
        handlers.append(urllib.request.HTTPSHandler(context=tls.client_context(certificate)))
    return urllib.request.build_opener(*handlers).open(request, timeout=timeout)


def open_unix(path: str, request: urllib.request.Request) -> Any:
    """A connection to a unix socket. The request's URL is of localhost."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), _UnixHandler(path)).open(request)


class _UnixHandler(urllib.request.HTTPHandler):
    def __init__(self, path: str):
        super().__init__()
        self._path = path

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(functools.partial(_UnixConnection, self._path), req)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, host: str, **options: Any):
        super().__init__(host, **options)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)
