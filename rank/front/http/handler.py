"""What all endpoints share: their state, the headers of every answer, errors in OpenAI's shape, bodies."""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid

import msgspec
import tornado.web

from ..config import FrontConfig
from ..errors import ApiError
from ..session import Sessions
from .metrics import ENDPOINTS, Metrics

log = logging.getLogger(__name__)
MAX_BODY = 64 << 20
DISCARD_BODY = 1 << 30  # a larger body than this is not even read to its end, so its sender may miss the 413
REQUEST_ID = re.compile(r"[\w.:-]{1,128}")


class State:
    """What the handlers share."""

    def __init__(self, sessions: Sessions, config: FrontConfig):
        self.sessions = sessions
        self.config = config
        self.link = sessions.link
        self.metrics = Metrics(sessions.link, sessions.names[0])
        self.started = int(time.time())
        self.active: dict[Handler, None] = {}  # requests that are being answered


class Handler(tornado.web.RequestHandler):
    """Base of all endpoints."""

    state: State
    needs_key = True
    request_id = ""

    def initialize(self, state: State) -> None:
        self.state = state

    def set_default_headers(self) -> None:
        self.set_header("Server", "phalanx")
        self.set_header("Access-Control-Allow-Origin", "*")
        self.set_header("Access-Control-Expose-Headers", "x-request-id")
        if not self.request_id:  # this runs again before an error is written
            asked = self.request.headers.get("X-Request-Id", "")
            self.request_id = asked if REQUEST_ID.fullmatch(asked) else uuid.uuid4().hex
        self.set_header("X-Request-Id", self.request_id)

    def prepare(self) -> None:
        self.state.active[self] = None
        key = self.state.config.api_key
        if key and self.needs_key and self.request.method != "OPTIONS":
            scheme, _, given = self.request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), key.encode()):
                raise ApiError(401, "a valid API key is needed: send it as \"Authorization: Bearer KEY\"",
                               code="invalid_api_key")

    def on_finish(self) -> None:
        self.state.active.pop(self, None)

    def options(self, *args: str) -> None:
        """The browser asks before it sends a request from another site."""
        self.set_header("Access-Control-Allow-Methods", "GET, POST, OPTIONS")
        self.set_header("Access-Control-Allow-Headers", "*, Authorization, Content-Type")
        self.set_header("Access-Control-Max-Age", "86400")
        self.set_status(204)

    def reply(self, value: object, status: int = 200) -> None:
        """Finish with a JSON object."""
        self.set_status(status)
        self.set_header("Content-Type", "application/json")
        self.finish(msgspec.json.encode(value))

    def write_error(self, status_code: int, **kwargs) -> None:
        error = kwargs.get("exc_info", (None, None, None))[1]
        if not isinstance(error, ApiError):
            error = self._other_error(status_code, error)
        self.set_status(error.status)
        if error.retry_after is not None:
            self.set_header("Retry-After", str(error.retry_after))
        self.reply(error.body(), error.status)

    def _other_error(self, status: int, error: BaseException | None) -> ApiError:
        path, method = self.request.path, self.request.method
        if status == 404:
            known = ", ".join(ENDPOINTS)
            return ApiError(404, f"there is nothing at {path}; the endpoints are {known}", code="not_found")
        if status == 405:
            allowed = " or ".join(name for name in ("GET", "POST") if _implements(type(self), name))
            self.set_header("Allow", f"{allowed}, OPTIONS")
            return ApiError(405, f"{method} is not allowed on {path}: use {allowed}", code="method_not_allowed")
        if isinstance(error, tornado.web.HTTPError) and status < 500:
            return ApiError(status, error.log_message or error.reason or f"bad request ({status})")
        return self.internal_error()

    def internal_error(self) -> ApiError:
        return ApiError(500, "an internal error; the server's log has the details under the request id "
                             f"{self.request_id}", code="internal_error")

    def log_exception(self, typ, value, tb) -> None:
        if not isinstance(value, ApiError | tornado.web.HTTPError):
            log.error("request %s failed: %s %s", self.request_id, self.request.method, self.request.path,
                      exc_info=(typ, value, tb))


def _implements(kind: type[Handler], method: str) -> bool:
    return getattr(kind, method.lower()) is not getattr(tornado.web.RequestHandler, method.lower())


class NotFound(Handler):
    needs_key = False

    def prepare(self) -> None:
        raise tornado.web.HTTPError(404)


@tornado.web.stream_request_body
class BodyHandler(Handler):
    """An endpoint with a JSON body, which is read here so that one too large is answered and not cut off."""

    def prepare(self) -> None:
        self._body: list[bytes] = []
        self._size = 0
        self.request.connection.set_max_body_size(DISCARD_BODY)  # type: ignore[union-attr]
        super().prepare()
        length = self.request.headers.get("Content-Length", "")
        if length.isdecimal() and int(length) > DISCARD_BODY:
            raise self._too_large()

    def data_received(self, chunk: bytes) -> None:
        self._size += len(chunk)
        if self._size <= MAX_BODY:
            self._body.append(chunk)
        else:
            self._body.clear()

    def body(self) -> bytes:
        if self._size > MAX_BODY:
            raise self._too_large()
        return b"".join(self._body)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the request's body is larger than the limit of {MAX_BODY >> 20} MiB", code="too_large")
