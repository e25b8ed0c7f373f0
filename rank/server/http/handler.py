"""The parts that all endpoints share: headers of every answer, keys, errors, bodies."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import sys
import time
import uuid
import zlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import tornado.web

from .... import logs
from .. import trace_context, tracing
from ..api_error import NOT_TAKEN, ApiError
from ..blocking import on_body
from ..body_values import BodyValues
from ..decoding import Kind, decode
from ..engine_client import STOPPING
from ..prompts import context_of
from ..trace_context import TraceContext
from . import spans
from .access import PROBES, UNTRACED
from .connection import StreamHandler
from .routes import paths
from .state import MAX_BODY, ServerState

if TYPE_CHECKING:
    from ..otel import RequestTrace
    from ..session import Session

log = logging.getLogger(__name__)
COUNTED_BODY = 64 << 10  # bytes; a larger one's values are counted before it is decoded
LARGE_BODY = 1 << 20  # bytes; a larger one waits for others, and is decoded in a thread
EXPANSION = 100  # of gzip, beyond LARGE_BODY: JSON of texts gets a tenth or so, only a bomb a thousandth
INLINE = 256 << 10  # bytes of a gzip body that are made on the event loop, as they take less than going to a thread
# Bytes a second that all large bodies together are read with. Reading and decoding one takes time of the
# event loop, which the streams of others feel; tokenising it would take far longer.
LARGE_RATE = 8 << 20
DISCARD_TIMEOUT = 30  # seconds in which a body is read and dropped that is refused; then its sender may miss why
MAX_CONTEXT = 1 << 17  # tokens that count for a body's values where the model that they are for is not known yet
Result = TypeVar("Result")
REQUEST_ID = re.compile(r"[\w.:-]{1,128}")


class Handler(StreamHandler):
    """Base of all endpoints."""

    needs_key = True
    key = 0  # which API key was sent
    known = True  # the request has a valid key, or the server asks for none
    label = "other"  # the path's, for the metrics
    request_id = ""
    begun = False  # the ranks have had something of the request
    trace: TraceContext | None = None
    recording: RequestTrace | None = None  # what is recorded of it
    session: Session | None = None  # what is generated for it
    failure = ""  # the code of an error that it was answered with

    @property
    def state(self) -> ServerState:
        state: ServerState = self.settings["state"]
        return state

    def set_default_headers(self) -> None:
        self.set_header("Server", "phalanx")
        self._let_page_read()
        if not self.request_id:  # this runs again before an error is written
            asked = self.request.headers.get("X-Request-Id", "")
            self.request_id = asked if REQUEST_ID.fullmatch(asked) else uuid.uuid4().hex
            self._begin_trace()
        self.set_header("X-Request-Id", self.request_id)
        self.set_header("Request-Id", self.request_id)  # what Anthropic's client reads
        if self.trace is not None:
            self.set_header("Traceresponse", self.trace.header())

    def _begin_trace(self) -> None:
        source = self.state.tracing
        if source is not None and self.request.path not in UNTRACED:
            self.recording = source.begin(self.request.headers, self.request._start_time)
            self.trace = self.recording.context
        elif parent := self.request.headers.get("Traceparent"):
            self.trace = trace_context.read(parent)

    @property
    def ids(self) -> dict[str, str]:
        """The ids by which the log names this request."""
        ids = {"request_id": self.request_id}
        if self.trace is not None:
            ids |= {"trace_id": self.trace.trace_id, "span_id": self.trace.span_id}
        return ids

    def _let_page_read(self) -> None:
        """Browsers keep an answer from a page of another server unless the answer names that server (CORS)."""
        access, origin = self.state.access, self.request.headers.get("Origin")
        if access.origins and "*" not in access.origins:
            self.set_header("Vary", "Origin")
        if origin is not None and (allowed := access.allowed(origin)):
            self.set_header("Access-Control-Allow-Origin", allowed)
            self.set_header("Access-Control-Expose-Headers", "x-request-id, request-id, traceresponse, retry-after")

    def prepare(self) -> None:
        logs.request.set(self.ids)  # this request has an asyncio task of its own
        if self.recording is not None:
            tracing.active.set(self.recording)
        self.state.active[self] = None
        if self._socket.crowded and self.request.path not in PROBES:
            busy = ApiError(503, "all connections are in use; try again later", code="busy", retry_after=1)
            raise busy.not_taken()
        sock = self._socket.socket  # none: the client has gone
        self.state.access.check(self.request, sock and sock.getsockname())
        keys = self.state.keys
        if not keys:
            return
        sent = self._sent_keys()  # all are compared with all: the time tells nothing
        same = [any([hmac.compare_digest(one, key) for one in sent]) for key in keys]
        self.known = any(same)
        if self.known:
            self.key = same.index(True)
        elif self.needs_key and self.request.method != "OPTIONS":
            raise ApiError(
                401, 'a valid API key is needed: send it as "Authorization: Bearer KEY"', code="invalid_api_key"
            )

    def _sent_keys(self) -> list[bytes]:
        """Keys in the two headers: OpenAI's clients send one, Anthropic's the other, some send both."""
        scheme, _, token = self.request.headers.get("Authorization", "").partition(" ")
        given = [token if scheme.lower() == "bearer" else "", self.request.headers.get("X-Api-Key", "")]
        return [one.strip().encode("latin-1") for one in given]

    def on_finish(self) -> None:
        self.state.active.pop(self, None)
        if self.recording is not None:
            self.end_trace(self.recording)

    def end_trace(self, trace: RequestTrace) -> None:
        """The request is answered: record it."""
        spans.end(self, trace, self.session)

    def on_connection_close(self) -> None:
        """The client has gone. One that leaves in the middle of its body is never answered, so nothing else ends it."""
        super().on_connection_close()
        self.state.active.pop(self, None)

    def options(self, **args: str) -> None:
        """The browser asks before it sends a request of a page of another server, which `prepare` has let in."""
        methods = self._allow()
        self.set_header("Allow", methods)
        if "Origin" in self.request.headers:
            self.set_header("Access-Control-Allow-Methods", methods)
            self.set_header("Access-Control-Allow-Headers", "*, Authorization, Content-Type")
            self.set_header("Access-Control-Max-Age", "86400")
        self.set_status(204)

    def allowed(self) -> list[str]:
        """The methods that this path has."""
        return []

    def _allow(self) -> str:
        """The Allow header; HEAD goes with GET."""
        return ", ".join((*self.allowed(), "OPTIONS")).replace("GET", "GET, HEAD")

    def error_body(self, error: ApiError) -> dict[str, Any]:
        """The shape of this endpoint's errors."""
        return error.body()

    def reply(self, value: object, status: int = 200) -> None:
        """Finish with a JSON object."""
        self.set_status(status)
        self.set_header("Content-Type", "application/json")
        self.finish(msgspec.json.encode(value))

    def write_error(self, status_code: int, **kwargs) -> None:
        error = kwargs.get("exc_info", (None, None, None))[1] or sys.exception()
        if isinstance(error, asyncio.CancelledError):  # nobody but the end of the process cancels
            error = ApiError(503, STOPPING, code="draining")
        if not isinstance(error, ApiError):
            error = self._other_error(status_code, error)
        self.set_status(error.status)
        self.failure = error.code or ""
        if not self._connection._read_finished:  # then Tornado closes it behind the answer
            self.set_header("Connection", "close")
        if error.retry_after is not None:
            self.set_header("Retry-After", str(error.retry_after))
        if not (error.taken or self.begun):
            self.set_header(NOT_TAKEN, error.code or "busy")
        self.reply(self.error_body(error), error.status)

    def _other_error(self, status: int, error: BaseException | None) -> ApiError:
        path, method = self.request.path, self.request.method
        if status == 404:
            known = ", ".join(sorted({route.path for methods in paths().values() for route in methods.values()}))
            return ApiError(404, f"there is nothing at {path}; the endpoints are {known}", code="not_found")
        if status == 405:
            allowed = " or ".join(self.allowed())
            self.set_header("Allow", self._allow())
            return ApiError(405, f"{method} is not allowed on {path}: use {allowed}", code="method_not_allowed")
        if isinstance(error, tornado.web.HTTPError) and status < 500:
            return ApiError(status, error.log_message or error.reason or f"bad request ({status})")
        return self.internal_error()

    def internal_error(self) -> ApiError:
        return ApiError(
            500,
            f"an internal error; the server's log has the details under the request id {self.request_id}",
            code="internal_error",
        )

    def log_exception(self, typ, value, tb) -> None:
        if not isinstance(value, ApiError | tornado.web.HTTPError | asyncio.CancelledError):
            log.error(
                "request %s failed: %s %s",
                self.request_id,
                self.request.method,
                self.request.path,
                exc_info=(typ, value, tb),
            )


@tornado.web.stream_request_body
class BodyHandler(Handler):
    """An endpoint with a JSON body, which is read here so that one too large is answered and not cut off."""

    def __init__(self, *args: Any, **more: Any):
        self._body: list[bytes] = []  # all this before `prepare`, which requests of unknown methods do not reach
        self._values: BodyValues | None = None  # once it is larger than COUNTED_BODY
        self._size = 0
        self._held = 0
        self._refused = self._gone = False  # refused: not kept
        self._late: ApiError | None = None  # told once the body is read
        self._work: asyncio.Task[Any] | None = None
        super().__init__(*args, **more)

    @property
    def body_limit(self) -> int:
        """Bytes that a body may have; of a larger one as many again are read and dropped, so that it is answered."""
        return MAX_BODY

    def prepare(self) -> None:
        self._tell_late(super().prepare)
        self._bound_body()

    def _bound_body(self) -> None:
        most = 2 * self.body_limit
        if self._late is not None:
            most = 2 * MAX_BODY
            self._connection.set_body_timeout(DISCARD_TIMEOUT)
        self._connection.set_max_body_size(most)
        length = self.request.headers.get("Content-Length", "")
        if length.isdecimal() and (len(length) > 12 or int(length) > most):
            raise self._late or self._too_large()
        self._refused |= length.isdecimal() and int(length) > MAX_BODY

    def _tell_late(self, check: Callable[[], None]) -> None:
        """Raise the check's error only once the body is read and dropped.

        An answer before that ends the connection, and its reset takes the answer from a client that still sends. One
        that sends its body when it is asked to (Expect) is answered at once, as is a browser's OPTIONS.
        """
        try:
            check()
        except ApiError as error:
            headers = self.request.headers
            if headers.get("Content-Length", "0") == "0" and "Transfer-Encoding" not in headers:
                raise
            if self.request.method == "OPTIONS" or "Expect" in headers:
                raise
            self._late, self._refused = error, True

    async def data_received(self, chunk: bytes) -> None:
        self._size += len(chunk)
        if self._size > MAX_BODY or self._refused:
            self.release()
            return
        self._body.append(chunk)
        if self._size <= COUNTED_BODY:
            return
        if not self._coding():
            self._count_values(chunk)
        if self._size > LARGE_BODY:
            self._hold()
            if self._body:  # what is thrown away costs nothing, and its sender waits for the answer
                await self._pace(len(chunk))

    def _coding(self) -> str:
        """The Content-Encoding, "" for none."""
        return self.request.headers.get("Content-Encoding", "identity").strip().lower().replace("identity", "")

    def _count_values(self, chunk: bytes) -> None:
        """Refuse a body of too many values as soon as it has them."""
        if self._values is None:
            self._values = BodyValues()
            chunk = b"".join(self._body)
        self._values.feed(chunk)
        try:
            self._values.check(self._context())
        except ApiError as error:
            self._late, self._refused = error, True
            self.release()

    def _context(self) -> int:
        ready = self.state.link.ready
        if ready is None or self.state.models is not None:
            return MAX_CONTEXT
        return context_of(ready)

    def _hold(self) -> None:
        if self._body:
            if self.state.coming.take(self.key, self._size - self._held):
                self._held = self._size
            else:
                self._refused = True
                self.release()

    async def _pace(self, size: int) -> None:
        now = time.monotonic()
        self.state.read_until = max(now, self.state.read_until) + size / LARGE_RATE
        await asyncio.sleep(self.state.read_until - now)

    async def decoded(self, kind: type[Kind]) -> Kind | None:
        """The body's request; None where the client has gone. Raises ApiError."""
        # Content types that a web page's form may send are rejected; clients that send none are no browsers.
        media = self.request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if media and media != "application/json" and not media.endswith("+json"):
            raise ApiError(415, f'the request\'s Content-Type is {media[:100]}: send "Content-Type: application/json"')
        if self._size > MAX_BODY:
            raise self._too_large()
        self._check_refused()
        if coding := self._coding():
            if coding not in ("gzip", "x-gzip"):
                raise ApiError(415, f"the request's Content-Encoding is {coding[:100]}: send gzip, or no coding at all")
            await self._inflate()
            if self._gone:
                return None
        parts, self._body = self._body, []
        if self._size <= LARGE_BODY:
            return decode(b"".join(parts), kind, self.state.config.strict)
        return await self.run(on_body(_decode, parts, kind, self.state.config.strict))

    def _check_refused(self) -> None:
        if self._refused:
            raise ApiError(
                429,
                f"bodies of more than {LARGE_BODY >> 20} MiB of this API key, or of all, that come in have all the "
                f"{self.state.coming.quota >> 20} MiB that are taken at a time; try again later",
                code="busy",
                retry_after=1,
            )

    async def _inflate(self) -> None:
        """Make a gzip body what it was; like others it is bounded, and what all large ones hold together is too."""
        inflater = Inflater(b"".join(self._body))
        self._body.clear()
        if not inflater.step(INLINE):
            await on_body(inflater.finish, self._context())
        if self._gone:
            return
        self._body, self._size = inflater.parts, max(self._size, inflater.size)
        if self._size > LARGE_BODY:
            self._hold()
            self._check_refused()
            await self._pace(inflater.size)

    async def run(self, work: Awaitable[Result]) -> Result | None:
        """Do this while the client is there; None where it has gone."""
        self._work = task = asyncio.ensure_future(work)
        await asyncio.wait([task])
        self._work = None
        if task.cancelled() and self._gone:
            return None
        error = task.exception()  # or CancelledError: the process ends
        if not isinstance(error, ApiError):
            return task.result()
        error.__context__ = None
        try:  # without the frames that it came through: they hold the text, and would live until the next collection
            raise error.with_traceback(None)
        finally:
            del error, task

    def release(self) -> None:
        """The body is not needed any more."""
        self._body.clear()
        self.state.coming.give(self.key, self._held)
        self._held = 0

    def on_finish(self) -> None:
        super().on_finish()
        self._over()

    def on_connection_close(self) -> None:
        super().on_connection_close()
        self._refused = self._gone = True  # what was received before may still be handed over
        self._over()

    def _over(self) -> None:
        if self._work is not None:
            self._work.cancel()
        self.release()
        if self._size > LARGE_BODY:
            self.state.engine.trim_soon()

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"the request's body is larger than the limit of {self.body_limit >> 20} MiB", code="too_large"
        )


@tornado.web.stream_request_body
class NotFound(BodyHandler):
    """The answer to unknown paths, which keeps nothing of their bodies."""

    needs_key = False

    def prepare(self) -> None:
        self._tell_late(self._answer)
        self._bound_body()

    def _answer(self) -> None:
        raise self._other_error(404, None)

    get = head = post = put = patch = delete = _answer

    def error_body(self, error: ApiError) -> dict[str, Any]:
        """The shape of the endpoint above it: Anthropic's clients look for theirs below /v1/messages."""
        above = next((one for path, one in paths().items() if self.request.path.startswith(f"{path}/")), {})
        return next(iter(above.values())).error(error) if above else error.body()


def _decode(parts: list[bytes], kind: type[Kind], strict: bool) -> Kind:
    """Decode a body in a thread, where copying it together holds up the event loop less than there."""
    body = b"".join(parts)
    parts.clear()
    return decode(body, kind, strict)


class Inflater:
    """A gzip body that becomes what it was, as far as it is bounded."""

    def __init__(self, body: bytes):
        self._inflater = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        self._rest = body
        self._most = max(LARGE_BODY, EXPANSION * len(body))
        self.parts: list[bytes] = []
        self.size = 0

    def step(self, most: int) -> bool:
        """Make so many bytes more. Returns whether these were the last. Raises ApiError."""
        try:
            part = self._inflater.decompress(self._rest, most)
        except zlib.error as error:
            raise ApiError(400, f"the request's body is not valid gzip: {error}") from None
        self._rest = self._inflater.unconsumed_tail
        self.parts.append(part)
        self.size += len(part)
        if self.size > min(self._most, MAX_BODY):
            raise ApiError(
                413,
                f"the request's body is larger than {MAX_BODY >> 20} MiB or {EXPANSION} times what was sent, once it "
                "is no gzip any more",
                code="too_large",
            )
        if not self._inflater.eof and not part:
            raise ApiError(400, "the request's body is not valid gzip: it is cut off")
        return self._inflater.eof

    def finish(self, context: int) -> None:
        """Make all the rest, in a thread. Raises ApiError, also for too many values."""
        values = BodyValues()
        values.feed(b"".join(self.parts))
        while not self.step(LARGE_BODY):
            values.feed(self.parts[-1])
            values.check(context)
        values.feed(self.parts[-1])
        values.check(context)
