"""A client's connection: what it may send as a head and as chunks, and the answer to what is no HTTP.

Tornado writes a bare status line where a request is malformed, and nothing where its head does not end. Both end in the
stream, which has a body for them in OpenAI's shape that names the fault. Then it closes: where the next request
would begin is not known.
"""

from __future__ import annotations

import contextlib
import http
import socket
import ssl
import struct
import sys
from asyncio import Future
from collections.abc import Awaitable
from typing import Any

import msgspec
import tornado.http1connection
import tornado.httpserver
import tornado.iostream
import tornado.web
from tornado import httputil

from ..api_error import ApiError
from .listener import Client, Listener, unsent

MAX_HEAD = 64 << 10
MAX_LINE = 16 << 10  # bytes of a request's first line: taking a query of 64 KiB apart holds up the event loop
MAX_HEADERS = 128  # as does parsing a head of thousands
FREE_CHUNKS = 4096  # of a body, which may be of any size ...
CHUNK = 256  # ... and so many bytes further ones have to have on average, as each takes as long as 10 KiB do
BARE = b"HTTP/1.1 400 Bad Request\r\n\r\n"  # all that Tornado says
TOO_LARGE = "chunked body too large"  # what it says where a body is longer than set_max_body_size
UNREAD = 1 << 20  # bytes of a refused request that are taken, as a reset for unread ones may overtake the answer


class Server(tornado.httpserver.HTTPServer):
    """Tornado's server on such streams, with a listener of its own."""

    listener: Listener

    def initialize(self, *args: Any, context: ssl.SSLContext | None = None, **options: Any) -> None:
        super().initialize(*args, **options)
        self.context = context

    def listen_on(self, sock: socket.socket) -> None:
        """Accept clients of a bound socket."""
        self.listener = Listener(sock, self)

    def stream_of(self, sock: socket.socket) -> Stream | None:
        """A stream of a connection; None where the client has gone."""
        sizes = self.max_buffer_size, self.read_chunk_size
        if self.context is None:
            return Stream(sock, *sizes)
        try:  # the handshake comes with the first bytes that are read
            sock = self.context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except OSError:
            sock.close()
            return None
        return TlsStream(sock, *sizes, ssl_options=self.context)

    def stop(self) -> None:
        super().stop()
        self.listener.stop()


class BadHead(httputil.HTTPInputError):
    """A head that would take too long to parse."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Stream(tornado.iostream.IOStream):
    """A client's connection."""

    client: Client
    crowded = False  # one too many: probes are answered, all others told 503, and it ends with its first request
    _listener: Listener | None = None
    _refused = False
    _requests = 0
    _chunks = 0  # of the body that is being read
    _received = 0  # bytes since its head
    _sent = 0

    def enter(self, listener: Listener, client: Client, crowded: bool) -> None:
        """Tell the listener from here on what the two ends wait for."""
        self._listener, self.client, self.crowded = listener, client, crowded

    def read_until_regex(self, regex: bytes, max_bytes: int | None = None) -> Awaitable[bytes]:
        """Read a request's head."""
        if self.crowded and self._requests:
            self.close()
            raise tornado.iostream.StreamClosedError
        self._requests += 1
        self._chunks = self._received = 0
        self._waits()
        return self._head(super().read_until_regex(regex, max_bytes))

    async def _head(self, reading: Awaitable[bytes]) -> bytes:
        head = await reading
        if head.count(b"\n") > MAX_HEADERS + 2:
            raise BadHead(431, f"the request has more than {MAX_HEADERS} headers")
        if head.find(b"\n", 4) > MAX_LINE:  # empty lines may come first
            raise BadHead(414, f"the request's first line is longer than {MAX_LINE >> 10} KiB")
        return head

    def read_until(self, delimiter: bytes, max_bytes: int | None = None) -> Awaitable[bytes]:
        """Read the line before a chunk."""
        self._chunks += 1
        if self._chunks > FREE_CHUNKS + self._received // CHUNK:
            raise httputil.HTTPInputError(f"{self._chunks} chunks have less than {CHUNK} bytes on average")
        self._waits()
        return super().read_until(delimiter, max_bytes)

    def read_bytes(self, num_bytes: int, partial: bool = False) -> Awaitable[bytes]:
        """Read a part of a body."""
        self._waits()
        return super().read_bytes(num_bytes, partial)

    def _waits(self) -> None:
        if self._listener is not None and not self.crowded:
            self._listener.waits(self)

    def answering(self) -> None:
        """The request has been read: the server waits for no byte of the client until the next one."""
        self.client.waits.pop(self, None)

    def read_from_fd(self, buf: bytearray | memoryview) -> int | None:
        count = super().read_from_fd(buf)
        self._received += count or 0
        return count

    def write_to_fd(self, data: memoryview) -> int:
        count = super().write_to_fd(data)
        self._sent += count
        return count

    def taken(self) -> int:
        """Bytes that have reached the client's machine; of TLS nearly, as what it adds is not counted."""
        return self._sent - unsent(self.socket)

    def write(self, data: bytes | memoryview) -> Future[None]:
        if data == BARE:  # written while the error is handled
            self._refused = True
            error = sys.exception()
            status = 413 if str(error) == TOO_LARGE else getattr(error, "status", 400)
            data = answer(ApiError(status, f"the request is not valid HTTP: {error}"))
        done = super().write(data)
        if self._listener is not None and self.writing():
            self._listener.blocked(self)
        return done

    def cut(self) -> None:
        """Close it at once, with what the client has not taken, which would take the system's memory for minutes."""
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self, exc_info: Any = False) -> None:
        if self.closed():
            return
        if isinstance(exc_info, tornado.iostream.UnsatisfiableReadError):
            error = ApiError(400, "the request is not valid HTTP: the size of a chunk is longer than 64 bytes")
            if self._read_regex is not None:  # a head was being read
                error = ApiError(431, f"the request's head is larger than the limit of {MAX_HEAD >> 10} KiB")
            self._refused = True
            with contextlib.suppress(tornado.iostream.StreamClosedError):
                super().write(answer(error))
        if self._refused and not self.closed():
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_WR)
                left = UNREAD
                while left > 0 and (data := self.socket.recv(64 << 10)):
                    left -= len(data)
        if self._listener is not None:
            self._listener.left(self)
            self._listener = None
        super().close(exc_info)


class TlsStream(Stream, tornado.iostream.SSLIOStream):
    """A client's connection by TLS."""


def answer(error: ApiError) -> bytes:
    """A whole response, after which the connection is closed."""
    body = msgspec.json.encode(error.body())
    head = (
        f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}\r\nServer: phalanx\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


class StreamHandler(tornado.web.RequestHandler):
    """A request handler that knows its connection: the server's and the gateway's handlers derive from it."""

    @property
    def _connection(self) -> tornado.http1connection.HTTP1Connection:
        assert isinstance(self.request.connection, tornado.http1connection.HTTP1Connection)
        return self.request.connection

    @property
    def _socket(self) -> Stream:
        stream = self._connection.stream
        assert isinstance(stream, Stream)
        return stream
