"""The one handler behind all routes: it decodes, prepares, and writes the answer, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from typing import Any
from urllib.parse import quote

import tornado.http1connection
import tornado.iostream
import tornado.web

from ..api_error import ApiError
from ..renderer import Renderer
from ..session import Session
from .handler import BodyHandler
from .routes import Call, Download, Events, Reply, Route
from .upload import Upload

KEEP_ALIVE = b": keep-alive\n\n"
PIECE = 1 << 18  # bytes of a download that are read and sent together
UPLOAD_TIMEOUT = 3600  # seconds
GONE = 499  # nginx's status for a request whose client left before there was an answer


@tornado.web.stream_request_body
class Endpoint(BodyHandler):
    """The routes of one path."""

    session: Session | None = None
    gone = False  # the client closed the connection
    _counted = False  # among the open requests of its key
    _behind: asyncio.Future[Any] | None = None  # until this is done, too
    _upload: Upload | None = None
    _entered = False  # its model has to stay loaded

    def initialize(self, routes: dict[str, Route]) -> None:
        self.routes = routes

        first = next(iter(routes.values()))
        self.needs_key, self.label = first.needs_key, first.path

    def allowed(self) -> list[str]:
        return list(self.routes)

    def error_body(self, error: ApiError) -> dict[str, Any]:
        return next(iter(self.routes.values())).error(error)

    @property
    def route(self) -> Route | None:
        method = "GET" if self.request.method == "HEAD" else self.request.method
        return self.routes.get(method or "")

    def prepare(self) -> None:
        super().prepare()
        if self._late is None:
            self._tell_late(self._receive)

    def _receive(self) -> None:
        """Have an upload written while it comes."""
        route = self.route
        if route is not None and route.receive is not None:
            self._count()
            self._upload = route.receive(self._call({}), self.request.headers.get("Content-Type", ""))
            self.request.connection.set_body_timeout(UPLOAD_TIMEOUT)  # type: ignore[union-attr]

    async def data_received(self, chunk: bytes) -> None:
        if self._upload is None:
            await super().data_received(chunk)
        else:
            await self._upload.write(chunk)

    def _call(self, args: dict[str, str]) -> Call:
        query = {name: self.get_query_argument(name) for name in self.request.query_arguments}
        return Call(self.state.sessions, None, args, query, self.state, self.key, self.release)

    async def _answer(self, **args: str) -> None:
        began = time.monotonic()
        route = self.route
        if self._late is not None:
            raise self._late
        if route is None:
            raise tornado.web.HTTPError(405)
        call = self._call(args)
        if self._upload is not None:
            call.request = await self._upload.finish()
        elif route.schema is not None:
            self._count()
            call.request = await self.decoded(route.schema)
            if self.state.models is not None:
                engine = self.state.models.named(getattr(call.request, "model", None))
                entered = await self.run(self.state.models.enter(engine))
                if entered is None:
                    return
                call.engine, self._entered = entered, True
        if self.gone:  # while its body was inflated
            self._leave()
            return
        answer = route.prepare(call)
        if inspect.isawaitable(answer):
            answer = await self.run(answer)
            if answer is None:
                return
        self.release()
        self._behind = call.behind
        if isinstance(answer, Session):
            assert route.render is not None and call.engine.text is not None
            answer = route.render(answer, call.request, call.engine.text.tokenizer)
        if isinstance(answer, Renderer):
            await self._generate(answer, call, began)
        elif isinstance(answer, Events):
            with contextlib.suppress(tornado.iostream.StreamClosedError):  # the client has gone
                await self._stream(answer)
        elif isinstance(answer, Download):
            with contextlib.suppress(tornado.iostream.StreamClosedError):
                await self._download(answer)
        else:
            self.send(answer if isinstance(answer, Reply) else Reply(answer))

    get = head = post = delete = _answer

    def _count(self) -> None:
        """Count this request as one of its key's. Raises ApiError 429 where there are too many."""
        used, limit = self.state.used[self.key], self.state.config.requests_per_key
        if limit and used.open >= limit:
            raise ApiError(
                429,
                f"this API key has {used.open} requests open and may have {limit} (--requests-per-key): wait for one",
                code="rate_limit_exceeded",
                retry_after=1,
            )
        self._counted = True
        used.open += 1

    def _uncount(self) -> None:
        if not self._counted:
            return
        self._counted = False
        used = self.state.used[self.key]
        if self._behind is None:
            used.close()
        else:
            self._behind.add_done_callback(lambda _: used.close())

    def _leave(self) -> None:
        """The model that answered may be unloaded."""
        if self._entered and self.state.models is not None:
            self._entered = False
            self.state.models.leave()

    def on_finish(self) -> None:
        super().on_finish()
        self._end_body()

    def _end_body(self) -> None:
        self._uncount()
        self._leave()
        if self._upload is not None:
            self._upload.close()

    def send(self, reply: Reply) -> None:
        """Finish with this."""
        for name, value in reply.headers.items():
            self.set_header(name, value)
        if isinstance(reply.body, bytes):
            self.set_status(reply.status)
            self.finish(reply.body)
        else:
            self.reply(reply.body, reply.status)

    async def _download(self, answer: Download) -> None:
        in_pool = self.state.sessions.in_pool
        with await in_pool(open, answer.path, "rb") as file:
            self.set_header("Content-Type", "application/octet-stream")
            self.set_header("Content-Length", str(answer.path.stat().st_size))
            self.set_header("Content-Disposition", f"attachment; filename*=UTF-8''{quote(answer.name)}")
            self.set_header("X-Content-Type-Options", "nosniff")
            while self.request.method != "HEAD" and (data := await in_pool(file.read, PIECE)):
                self.write(data)
                await self.flush()
        self.finish()

    async def _generate(self, renderer: Renderer, call: Call, began: float) -> None:
        self.session = renderer.session
        self.session.start = began
        try:
            if self.gone:  # while the prompt was tokenised
                return
            if call.request.stream:
                await self._stream(Events(renderer.stream(), renderer.error))
            else:
                answer = await renderer.collect()
                if not self.gone:
                    self.reply(answer)
        except tornado.iostream.StreamClosedError:
            self.gone = True
        finally:
            renderer.close()
            self.state.metrics.session(self.session, self.gone)
            call.count(self.session.prompt_tokens, self.session.completion_tokens)

    def on_connection_close(self) -> None:
        super().on_connection_close()
        self.gone = True
        if not self._headers_written:
            self.set_status(GONE, "Client Closed Request")  # for the log and the metrics: nobody reads it
        self._end_body()
        if self.session is not None:
            self.session.close()

    @property
    def _socket(self) -> tornado.iostream.IOStream:
        assert isinstance(self.request.connection, tornado.http1connection.HTTP1Connection)
        return self.request.connection.stream

    async def _stream(self, events: Events) -> None:
        """Tokens that come while the client has not taken the last event go into the next one together."""
        ticker = asyncio.ensure_future(self._keep_alive())
        try:
            async for data in events.stream:
                if self.gone:
                    break
                await self._send(data)
        except tornado.iostream.StreamClosedError:
            raise
        except Exception as error:
            if not self._headers_written:
                raise
            if not isinstance(error, ApiError):
                self.log_exception(type(error), error, error.__traceback__)
                error = self.internal_error()
            # The status is out already: the error is an event, and none follows.
            await self._send(events.error(error))
        finally:
            ticker.cancel()
        if not self.gone:
            self.finish()

    def _send(self, data: bytes) -> asyncio.Future[None]:
        """Write an event; the future is done once the client's socket has taken it."""
        if not self._headers_written:
            self.set_header("Content-Type", "text/event-stream; charset=utf-8")
            self.set_header("Cache-Control", "no-cache")
            self.set_header("X-Accel-Buffering", "no")
            self._socket.set_nodelay(True)
        self._last_sent = time.monotonic()
        self.write(data)
        return self.flush()

    async def _keep_alive(self) -> None:
        """A comment after some silence, so that proxies and clients do not give up on a long queue or prompt."""
        interval = self.state.config.keep_alive_interval
        self._last_sent = time.monotonic()
        while interval > 0:
            await asyncio.sleep(max(self._last_sent + interval - time.monotonic(), 0.01))
            # A client that has not taken the last event yet needs no comment. The comment's future is not awaited:
            # Tornado forgets it when the next event is written meanwhile.
            if time.monotonic() >= self._last_sent + interval and not self._socket.writing() and not self.gone:
                self._send(KEEP_ALIVE)
