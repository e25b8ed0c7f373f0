"""A lean HTTP/1.1 client for OpenAI's endpoints: one connection per request, answers whole or as events.

It must cost less than the server that it measures. So there is one buffer for all connections, an event is one line
that msgspec reads straight into a struct, and an event without text costs the same few microseconds.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec

from ....rank.server import tls

RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
LONGEST_WAIT = 30.0  # seconds, whatever Retry-After says


class Failure(Exception):
    """The reason why a request got no usable answer."""

    def __init__(self, reason: str, retry: bool = False, after: float | None = None, status: int = 0):
        super().__init__(reason)
        self.retry = retry
        self.after = after
        self.status = status


class Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class Choice(msgspec.Struct, gc=False):
    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class Details(msgspec.Struct):
    cached_tokens: int | None = None


class CompletionDetails(msgspec.Struct):
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: Details | None = None
    completion_tokens_details: CompletionDetails | None = None


class Chunk(msgspec.Struct, gc=False):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(Chunk).decode


class Answer:
    """A streamed answer as it comes: when, and as text only if asked for."""

    def __init__(self, keep_text: bool = False):
        self.times: list[float] = []  # when an event came that had text
        self.ended = 0.0  # when the last event with a choice came
        self.finish: str | None = None
        self.usage: Usage | None = None
        self.error: str | None = None
        self.text: list[str] | None = [] if keep_text else None

    def event(self, now: float, payload: bytes) -> None:
        if payload == b"[DONE]":
            return
        try:
            chunk = _decode(payload)
        except msgspec.DecodeError as error:
            self.error = self.error or f"an event that is no chunk: {error}: {payload[:80].decode(errors='replace')}"
            return
        if chunk.usage is not None:
            self.usage = chunk.usage
        if chunk.error is not None:
            self.error = f"the stream ended with an error: {message(payload)}"
        for choice in chunk.choices:
            self.ended = now
            self.finish = choice.finish_reason or self.finish
            delta = choice.delta
            text = choice.text if delta is None else delta.content or delta.reasoning_content or delta.reasoning
            if text or (delta is not None and delta.tool_calls):
                self.times.append(now)
                if self.text is not None and text:
                    self.text.append(text)

    def check(self) -> None:
        """Raises Failure unless all that is reported of an answer is there."""
        if self.error:
            raise Failure(self.error)
        if self.finish is None:
            raise Failure("the stream ended without a finish_reason", retry=True)
        if self.usage is None:
            raise Failure("the server sent no usage though stream_options.include_usage asked for it")


def message(body: bytes) -> str:
    """The message in an error's body: OpenAI's shape, or its first characters."""
    try:
        value: Any = msgspec.json.decode(body)
    except msgspec.DecodeError:
        value = body.decode(errors="replace")
    for key in ("error", "message", "detail"):
        if isinstance(value, dict) and key in value:
            value = value[key]
    text = " ".join(str(value).split())
    return text if len(text) <= 300 else text[:297] + "..."


_BUFFER = memoryview(bytearray(1 << 18))  # what was just received; copied out before anything else is read


class Exchange(asyncio.BufferedProtocol):
    """One request and its answer. `done` is set at the answer's end, or with the reason why it has none."""

    def __init__(self, request: bytes, on_event: Callable[[float, bytes], None] | None):
        self.request = request
        self.on_event = on_event
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = bytearray()  # of an answer that is no stream; of a stream, the begun line
        self._transport: asyncio.Transport | None = None
        self._pending = b""  # received and not understood yet
        self._length: int | None = None  # bytes that are left of the body, or of the chunk
        self._chunked = False
        self._streams = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self.request)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        now = time.perf_counter()
        data = self._pending + bytes(_BUFFER[:nbytes]) if self._pending else bytes(_BUFFER[:nbytes])
        self._pending = b""
        try:
            if not self.status:
                head = data.find(b"\r\n\r\n")
                if head < 0:
                    self._pending = data
                    return
                self._head(data[:head].decode("latin-1"))
                data = data[head + 4 :]
            if self._chunked:
                self._chunks(now, data)
            else:
                self._plain(now, data)
        except (ValueError, IndexError):
            self._end(Failure("the answer is not HTTP/1.1"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.status and not self._chunked and self._length is None:
            self._end()
        else:
            what = "in the middle of its answer" if self.status else "without an answer"
            self._end(Failure(f"the server closed the connection {what}", retry=True))

    def _head(self, text: str) -> None:
        first, *lines = text.split("\r\n")
        if not first.startswith("HTTP/1."):
            raise ValueError(first)
        self.status = int(first.split()[1])
        self.headers = {key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        self._chunked = self.headers.get("transfer-encoding", "").lower() == "chunked"
        if not self._chunked and "content-length" in self.headers:
            self._length = int(self.headers["content-length"])
        self._streams = (
            self.on_event is not None
            and self.status == 200
            and self.headers.get("content-type", "").startswith("text/event-stream")
        )

    def _plain(self, now: float, data: bytes) -> None:
        self._content(now, data)
        if self._length is not None:
            self._length -= len(data)
            if self._length <= 0:
                self._end()

    def _chunks(self, now: float, data: bytes) -> None:
        at = 0
        while True:
            line = data.find(b"\r\n", at)
            if line < 0:
                break
            size = int(data[at:line].split(b";")[0], 16)
            start, end = line + 2, line + 2 + size
            if size == 0:
                self._end()
                return
            if end + 2 > len(data):
                break
            self._content(now, data[start:end])
            at = end + 2
        self._pending = data[at:]

    def _content(self, now: float, data: bytes) -> None:
        if not self._streams:
            self.body += data
            return
        assert self.on_event is not None
        if self.body:
            data = bytes(self.body) + data
            self.body.clear()
        *lines, rest = data.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self.on_event(now, line[5:].strip())
        if rest:
            self.body += rest

    def _end(self, failure: Failure | None = None) -> None:
        if not self.done.done():
            if failure:
                self.done.set_exception(failure)
            else:
                self.done.set_result(None)
        if self._transport is not None:
            self._transport.close()


class Client:
    """A server's address, its key, and requests to it. `root` ends before /v1."""

    def __init__(
        self, url: str, api_key: str, timeout: float, certificate: str = "", content_type: str = "application/json"
    ):
        """certificate: of TLS, PEM, where the client knows it already. content_type: of all bodies."""
        parts = urlsplit(url)
        self.root = url
        self._unix = parts.path if parts.scheme == "unix" else ""
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._path = "" if self._unix else parts.path.rstrip("/")
        self._ssl = tls.client_context(certificate) if parts.scheme == "https" else None
        self._common = (
            f"Host: {parts.netloc or 'localhost'}\r\nAuthorization: Bearer {api_key}\r\nConnection: close\r\n"
            f"Content-Type: {content_type}\r\nAccept: */*\r\n"
        )
        self.timeout = timeout

    def _bytes(self, method: str, path: str, body: bytes) -> bytes:
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._common}Content-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    async def call(self, method: str, path: str, body: bytes = b"", answer: Answer | None = None) -> bytes:
        """One attempt; the body of an answer that is no stream. Raises Failure."""
        exchange = Exchange(self._bytes(method, path, body), answer.event if answer else None)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.timeout):
                try:
                    if self._unix:
                        await loop.create_unix_connection(lambda: exchange, self._unix)
                    else:
                        await loop.create_connection(lambda: exchange, self._host, self._port, ssl=self._ssl)
                except OSError as error:
                    where = self._unix or f"{self._host} port {self._port}"
                    raise Failure(f"no connection to {where}: {_why(error)}", retry=True) from None
                await exchange.done
        except TimeoutError:
            raise Failure(f"no whole answer within {self.timeout:g} s") from None
        finally:
            exchange._end()
        if exchange.status != 200:
            raise _refused(exchange)
        if answer is not None:
            if not exchange._streams:
                raise Failure(f"the answer is no stream but {exchange.headers.get('content-type', 'of no type')}")
            answer.check()
        return bytes(exchange.body)


def _why(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError) or f"Errno {errno.ECONNREFUSED}]" in str(error):
        return "refused, no server listens there"
    return error.strerror or str(error)


def _refused(exchange: Exchange) -> Failure:
    after = exchange.headers.get("retry-after", "")
    return Failure(
        f"HTTP {exchange.status}: {message(bytes(exchange.body))}",
        exchange.status in RETRIED,
        min(float(after), LONGEST_WAIT) if after.isdecimal() else None,
        exchange.status,
    )
