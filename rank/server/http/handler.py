"""What all endpoints share: the headers of every answer, keys, errors, bodies."""

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
from typing import Any, TypeVar

import msgspec
import tornado.http1connection
import tornado.web

from ..api_error import ApiError
from ..decoding import Kind, decode
from ..engine_client import STOPPING
from ..text_engine import LARGE_BODY
from .routes import paths
from .state import ServerState

log = logging.getLogger(__name__)
MAX_BODY = 64 << 20
# Bytes a second that all large bodies together are read with. Reading and decoding one takes time of the
# event loop, which the streams of others feel; tokenising it would take far longer.
LARGE_RATE = 8 << 20
DISCARD_BODY = 1 << 30  # a larger body than this is not even read to its end, so its sender may miss the 413
Result = TypeVar("Result")
REQUEST_ID = re.compile(r"[\w.:-]{1,128}")


class Handler(tornado.web.RequestHandler):
    """Base of all endpoints."""

    needs_key = True
    key = 0  # which API key was sent
    label = "other"  # the path's, for the metrics
    request_id = ""

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
        self.set_header("X-Request-Id", self.request_id)
        self.set_header("Request-Id", self.request_id)  # what Anthropic's client reads

    def _let_page_read(self) -> None:
        """Browsers keep an answer from a page of another server unless the answer names that server (CORS)."""
        access, origin = self.state.access, self.request.headers.get("Origin")
        if access.origins and "*" not in access.origins:
            self.set_header("Vary", "Origin")
        if origin is not None and (allowed := access.allowed(origin)):
            self.set_header("Access-Control-Allow-Origin", allowed)
            self.set_header("Access-Control-Expose-Headers", "x-request-id, request-id, retry-after")

    def prepare(self) -> None:
        self.state.active[self] = None
        assert isinstance(self.request.connection, tornado.http1connection.HTTP1Connection)
        sock = self.request.connection.stream.socket  # none: the client has gone
        self.state.access.check(self.request, sock and sock.getsockname())
        keys = self.state.keys
        if not keys or not self.needs_key or self.request.method == "OPTIONS":
            return
        sent = self._sent_keys()  # all are compared with all: the time tells nothing
        same = [any([hmac.compare_digest(one, key) for one in sent]) for key in keys]
        if not any(same):
            raise ApiError(
                401, 'a valid API key is needed: send it as "Authorization: Bearer KEY"', code="invalid_api_key"
            )

        self.key = same.index(True)

    def _sent_keys(self) -> list[bytes]:
        """What the two headers for a key have: OpenAI's clients send one, Anthropic's the other, some send both."""
        scheme, _, token = self.request.headers.get("Authorization", "").partition(" ")
        given = [token if scheme.lower() == "bearer" else "", self.request.headers.get("X-Api-Key", "")]
        return [one.strip().encode("latin-1") for one in given]

    def on_finish(self) -> None:
        self.state.active.pop(self, None)

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
        """As a header: where there is GET, there is HEAD."""
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
        assert isinstance(self.request.connection, tornado.http1connection.HTTP1Connection)
        if not self.request.connection._read_finished:  # then Tornado closes it behind the answer
            self.set_header("Connection", "close")
        if error.retry_after is not None:
            self.set_header("Retry-After", str(error.retry_after))
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


class NotFound(Handler):
    needs_key = False

    def prepare(self) -> None:
        raise tornado.web.HTTPError(404)

    def error_body(self, error: ApiError) -> dict[str, Any]:
        """As the endpoint above it has them: Anthropic's clients look for theirs below /v1/messages."""
        above = next((one for path, one in paths().items() if self.request.path.startswith(f"{path}/")), {})
        return next(iter(above.values())).error(error) if above else error.body()


@tornado.web.stream_request_body
class BodyHandler(Handler):
    """An endpoint with a JSON body, which is read here so that one too large is answered and not cut off."""

    def __init__(self, *args: Any, **more: Any):
        self._body: list[bytes] = []  # all this before `prepare`, which requests of unknown methods do not reach
        self._size = 0
        self._held = 0
        self._refused = self._gone = False  # refused: not kept
        self._late: ApiError | None = None  # told once the body is read
        self._work: asyncio.Task[Any] | None = None
        super().__init__(*args, **more)

    def prepare(self) -> None:
        self.request.connection.set_max_body_size(DISCARD_BODY)  # type: ignore[union-attr]
        self._tell_late(super().prepare)
        length = self.request.headers.get("Content-Length", "")
        if length.isdecimal() and (len(length) > 12 or int(length) > DISCARD_BODY):
            raise self._too_large()
        self._refused |= length.isdecimal() and int(length) > MAX_BODY

    def _tell_late(self, check: Callable[[], None]) -> None:
        """Raise the check's error only once the body is read and dropped.

        An answer before that ends the connection, and its reset takes the answer from a client that still sends. One
        that sends its body when it is asked to (Expect) is told at once, as is a browser's OPTIONS.
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
        else:
            self._body.append(chunk)
        if self._size > LARGE_BODY:
            self._hold()
            if self._body:  # what is thrown away costs nothing, and its sender waits for the answer
                await self._pace(len(chunk))

    def _hold(self) -> None:
        if self._body:
            self.state.held += self._size - self._held
            self._held = self._size
        if self.state.held > MAX_BODY:
            self._refused = True
            self.release()

    async def _pace(self, size: int) -> None:
        now = time.monotonic()
        self.state.read_until = max(now, self.state.read_until) + size / LARGE_RATE
        await asyncio.sleep(self.state.read_until - now)

    async def body(self) -> bytes:
        """The whole body, once."""
        kind = self.request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        # What a form of a web page may send is refused; clients that send no type at all are no browsers.
        if kind and kind != "application/json" and not kind.endswith("+json"):
            raise ApiError(415, f'the request\'s Content-Type is {kind[:100]}: send "Content-Type: application/json"')
        if self._size > MAX_BODY:
            raise self._too_large()
        self._check_refused()
        body = b"".join(self._body)
        self._body.clear()
        coding = self.request.headers.get("Content-Encoding", "identity").strip().lower()
        if coding in ("identity", ""):
            return body
        if coding not in ("gzip", "x-gzip"):
            raise ApiError(415, f"the request's Content-Encoding is {coding[:100]}: send gzip, or no coding at all")
        return await self._inflated(body)

    def _check_refused(self) -> None:
        if self._refused:
            raise ApiError(
                429,
                f"other requests of more than {LARGE_BODY >> 20} MiB have {MAX_BODY >> 20} MiB in "
                "hand already; try again later",
                code="busy",
                retry_after=1,
            )

    async def _inflated(self, body: bytes) -> bytes:
        """A gzip body as it was; like others it is bounded, and what all large ones hold together is too."""
        whole = await self.state.sessions.in_pool(_inflate, body)
        if len(whole) > MAX_BODY:
            raise self._too_large()
        self._size = max(self._size, len(whole))
        if self._size > LARGE_BODY:
            self._body.append(whole)
            self._hold()
            self._check_refused()
            self._body.clear()
            await self._pace(len(whole))
        return whole

    async def decoded(self, kind: type[Kind]) -> Kind:
        """The body's request. Raises ApiError."""
        body = await self.body()
        self.state.sessions.check_body(body)
        return decode(body, kind, self.state.config.strict)

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
        self.state.held -= self._held
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
            self.state.sessions.trim_soon()

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the request's body is larger than the limit of {MAX_BODY >> 20} MiB", code="too_large")


def _inflate(body: bytes) -> bytes:
    """A gzip file's content; of one that is too large a little more than the limit."""
    inflater = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        whole = inflater.decompress(body, MAX_BODY + 1)
    except zlib.error as error:
        raise ApiError(400, f"the request's body is not valid gzip: {error}") from None
    if not inflater.eof and len(whole) <= MAX_BODY:
        raise ApiError(400, "the request's body is not valid gzip: it is cut off")
    return whole
