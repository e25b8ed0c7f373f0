"""One request to a job, over a connection of its own: bytes go on as they come, and only as fast as they are taken."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import urllib.parse
from collections.abc import Awaitable, Callable
from typing import Any

import tornado.http1connection
import tornado.iostream
from tornado import httputil

from ...rank.server import tls
from ...rank.server.server_registry import RegisteredServer

CONNECT = 5.0  # seconds
MAX_HEAD = 64 << 10
ANY_SIZE = 1 << 62
# Headers that concern one connection only (RFC 9110, 7.6.1), and what this end has answered itself.
HOP = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade", "expect",
}  # fmt: skip


class Unreachable(Exception):
    """No connection to the job: it has had nothing of the request."""


class Lost(Exception):
    """The connection ended before the answer did."""


async def connect(server: RegisteredServer) -> tornado.iostream.IOStream:
    """A connection to the address of a registry file. Raises Unreachable."""
    parts = urllib.parse.urlsplit(server.url)
    try:
        async with asyncio.timeout(CONNECT):
            if parts.scheme == "unix":
                return await _connected(socket.AF_UNIX, server.url.removeprefix("unix://"))
            return await _connect_tcp(parts, server.certificate)
    except (OSError, tornado.iostream.StreamClosedError, TimeoutError) as error:
        raise Unreachable(str(getattr(error, "real_error", None) or error) or "timed out") from None


async def _connect_tcp(parts: urllib.parse.SplitResult, certificate: str) -> tornado.iostream.IOStream:
    host = parts.hostname or ""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, parts.port, type=socket.SOCK_STREAM)
    context: ssl.SSLContext | None = tls.client_context(certificate) if parts.scheme == "https" else None
    error: BaseException = OSError("no address")
    for family, _, _, _, address in found:
        try:
            plain = await _connected(family, address)
            plain.set_nodelay(True)
            if context is None:
                return plain
            return await plain.start_tls(False, context, server_hostname=None if certificate else host)
        except (OSError, tornado.iostream.StreamClosedError) as failed:
            error = failed
    raise error


async def _connected(family: int, address: Any) -> tornado.iostream.IOStream:
    stream = tornado.iostream.IOStream(socket.socket(family, socket.SOCK_STREAM))
    try:
        await stream.connect(address)
    except BaseException:
        stream.close()
        raise
    return stream


class Answer(httputil.HTTPMessageDelegate):
    """A job's answer, as it comes. `begin` gets the head and `more` each chunk; the next waits for them."""

    def __init__(
        self,
        begin: Callable[[int, httputil.HTTPHeaders], Awaitable[None] | None],
        more: Callable[[bytes], Awaitable[None] | None],
    ):
        self._begin, self._more = begin, more
        self.whole = False

    def headers_received(self, start_line: Any, headers: httputil.HTTPHeaders) -> Awaitable[None] | None:
        return self._begin(start_line.code, headers) if start_line.code >= 200 else None

    def data_received(self, chunk: bytes) -> Awaitable[None] | None:
        return self._more(chunk)

    def finish(self) -> None:
        self.whole = True


class Exchange:
    """A request that is being sent, and its answer."""

    def __init__(self, stream: tornado.iostream.IOStream, method: str, uri: str, headers: httputil.HTTPHeaders):
        params = tornado.http1connection.HTTP1ConnectionParameters(
            no_keep_alive=True, max_header_size=MAX_HEAD, max_body_size=ANY_SIZE
        )
        self._stream = stream
        self._connection = tornado.http1connection.HTTP1Connection(stream, True, params)
        self._connection.write_headers(httputil.RequestStartLine(method, uri, ""), headers)

    def write(self, chunk: bytes) -> asyncio.Future[None]:
        """The next bytes of the body; the future is done once the job has taken them, or is gone."""
        return self._connection.write(chunk)

    async def read(self, answer: Answer) -> None:
        """The request is whole; read the answer to its end. Raises Lost where that does not come."""
        with contextlib.suppress(tornado.iostream.StreamClosedError):
            self._connection.finish()
            await self._connection.read_response(answer)
        if not answer.whole:
            raise Lost("the connection ended")

    def close(self) -> None:
        self._stream.close()


def passed_on(headers: httputil.HTTPHeaders) -> httputil.HTTPHeaders:
    """The headers that are for the other end."""
    named = {name.strip().lower() for line in headers.get_list("Connection") for name in line.split(",")}
    found = httputil.HTTPHeaders()
    for name, value in headers.get_all():
        if name.lower() not in HOP | named:
            found.add(name, value)
    return found


async def fetch(server: RegisteredServer, path: str, headers: httputil.HTTPHeaders, limit: int) -> tuple[int, bytes]:
    """Status and body of a small answer. Raises Unreachable and Lost."""
    status = size = 0
    parts: list[bytes] = []

    def begin(code: int, _: httputil.HTTPHeaders) -> None:
        nonlocal status
        status = code

    def more(chunk: bytes) -> None:
        nonlocal size
        size += len(chunk)
        if size > limit:
            stream.close()
        parts.append(chunk)

    stream = await connect(server)
    try:
        await Exchange(stream, "GET", path, headers).read(Answer(begin, more))
    finally:
        stream.close()
    if not status or size > limit:
        raise Lost("no answer" if not status else "the answer is too large")
    return status, b"".join(parts)


def host_of(server: RegisteredServer) -> str:
    """The Host of a request that is the gateway's own."""
    parts = urllib.parse.urlsplit(server.url)
    return "localhost" if parts.scheme == "unix" else parts.netloc
