"""The answer to what is no HTTP, in OpenAI's shape.

Tornado writes a bare status line where a request is malformed, and nothing where its head does not end. Both end in the
stream, which has a body for them that says what is wrong. Then it closes: where the next request would begin is not
known.
"""

from __future__ import annotations

import contextlib
import http
import socket
import ssl
import sys
from asyncio import Future
from typing import Any

import msgspec
import tornado.httpserver
import tornado.iostream

from ..api_error import ApiError

MAX_HEAD = 64 << 10
BARE = b"HTTP/1.1 400 Bad Request\r\n\r\n"  # all that Tornado says
UNREAD = 1 << 20  # bytes of a refused request that are taken, as a reset for unread ones may overtake the answer


class Server(tornado.httpserver.HTTPServer):
    """Tornado's server on such streams."""

    def initialize(self, *args: Any, context: ssl.SSLContext | None = None, **options: Any) -> None:
        super().initialize(*args, **options)
        self.context = context

    def handle_stream(self, stream: tornado.iostream.IOStream, address: tuple) -> None:
        sizes = self.max_buffer_size, self.read_chunk_size
        if self.context is None:
            super().handle_stream(Stream(stream.socket, *sizes), address)
            return
        try:  # the handshake comes with the first bytes that are read
            sock = self.context.wrap_socket(stream.socket, server_side=True, do_handshake_on_connect=False)
        except OSError:  # the client has gone
            stream.close()
            return
        super().handle_stream(TlsStream(sock, *sizes, ssl_options=self.context), address)


class Stream(tornado.iostream.IOStream):
    """A client's connection."""

    _refused = False

    def write(self, data: bytes | memoryview) -> Future[None]:
        if data == BARE:  # written while the error is handled
            self._refused = True
            data = answer(ApiError(400, f"the request is not valid HTTP: {sys.exception()}"))
        return super().write(data)

    def close(self, exc_info: Any = False) -> None:
        if isinstance(exc_info, tornado.iostream.UnsatisfiableReadError) and not self.closed():
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
