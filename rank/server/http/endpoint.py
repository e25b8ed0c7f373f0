"""The one handler behind all routes: it decodes, prepares, and writes the answer, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import tornado.iostream
import tornado.web

from ..anthropic_format import error_body as anthropic_error
from ..api_error import ApiError, bad
from ..blocking import on_disk
from ..file_store import MAX_FILE, changed_bytes, damaged, new_digest
from ..renderer import Renderer
from ..session import Session
from . import spans
from .handler import BodyHandler
from .routes import ANTHROPIC, Call, Download, Events, Lines, Reply, Route
from .upload import Upload

if TYPE_CHECKING:
    from ..otel import RequestTrace

log = logging.getLogger(__name__)
KEEP_ALIVE = b": keep-alive\n\n"
PIECE = 1 << 18  # bytes of a download that are read and sent together
UPLOAD_TIMEOUT = 3600  # seconds
GONE = 499  # nginx's status for a request whose client left before there was an answer


@tornado.web.stream_request_body
class Endpoint(BodyHandler):
    """The routes of one path."""

    gone = False  # the client closed the connection
    _counted = False  # among the open requests of its key
    _ahead = 0  # sequences among those of its key that go before others
    _behind: asyncio.Future[Any] | None = None  # until this is done, too
    _upload: Upload | None = None
    _entered = False  # its model has to stay loaded
    _live = 0  # bytes that count among the live ones of its key
    _ended = False

    def initialize(self, routes: dict[str, Route]) -> None:
        self.routes = routes

        first = next(iter(routes.values()))
        self.needs_key, self.label = first.needs_key, first.path

    def allowed(self) -> list[str]:
        return list(self.routes)

    def error_body(self, error: ApiError) -> dict[str, Any]:
        route = next(iter(self.routes.values()))
        if route.both and ANTHROPIC in self.request.headers:
            return anthropic_error(error)
        return route.error(error)

    @property
    def route(self) -> Route | None:
        method = "GET" if self.request.method == "HEAD" else self.request.method
        return self.routes.get(method or "")

    @property
    def body_limit(self) -> int:
        return MAX_FILE if self.route is not None and self.route.receive is not None else super().body_limit

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
            self._connection.set_body_timeout(UPLOAD_TIMEOUT)

    async def data_received(self, chunk: bytes) -> None:
        if self._upload is None:
            await super().data_received(chunk)
        else:
            await self._upload.write(chunk)

    def _call(self, args: dict[str, str]) -> Call:
        repeated = {name: self.get_query_arguments(name) for name in self.request.query_arguments}
        query = {name: values[-1] for name, values in repeated.items()}
        return Call(
            self.state.engine, None, args, query, repeated, self.request.headers, self.state, self.key, self.known,
            self.release,
        )  # fmt: skip

    async def _answer(self, **args: str) -> None:
        began = time.monotonic()
        self._socket.answering()
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
            if call.request is None or self.gone:
                return
            if not self._hold_live(self._size):
                raise too_much_live()
            self._check_priority(call)
            if self.state.models is not None:
                engine = self.state.models.named(getattr(call.request, "model", None))
                asked_at, loaded = time.monotonic(), self.state.models.loaded
                entered = await self.run(self.state.models.enter(engine))
                if entered is None:
                    return
                call.engine, self._entered = entered, True
                if self.recording is not None and loaded != engine.model:
                    about = {"gen_ai.request.model": engine.names[0]}
                    self.recording.child("model switch", asked_at, time.monotonic(), about)
            if self.recording is not None:
                self.recording.attributes |= spans.asked(route.path, call.request, call.engine.names[0])
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
        elif isinstance(answer, Lines):
            with contextlib.suppress(tornado.iostream.StreamClosedError):
                await self._send_lines(answer)
        elif isinstance(answer, Download):
            with contextlib.suppress(tornado.iostream.StreamClosedError):
                await self._download(answer)
        else:
            self.send(answer if isinstance(answer, Reply) else Reply(answer))

    get = head = post = delete = _answer

    def _count(self) -> None:
        """Count this request as one of its key's. Raises ApiError 429 where there are too many."""
        used, limit = self.state.used[self.key], self.state.requests_per_key
        if limit and used.open >= limit:
            raise ApiError(
                429,
                f"this API key has {used.open} requests open and may have {limit} (--requests-per-key): wait for one",
                code="rate_limit_exceeded",
                retry_after=1,
            )
        self._counted = True
        used.open += 1

    def _check_priority(self, call: Call) -> None:
        """Let a key's requests go before others' as far as its share reaches: all keys together never have all rows.

        What is beyond the share stands among the others. Raises ApiError 400 where clients may not set a priority.
        """
        if not (priority := getattr(call.request, "priority", None)):
            return
        if not self.state.config.client_priorities:
            raise bad("priority", f"priority is {priority}: this server takes only 0 (without --client-priorities)")
        ready = self.state.link.ready
        if priority < 0 and ready is not None:
            used, count = self.state.used[self.key], call.request.sequences()
            if used.ahead + count > ready.max_num_seqs // (len(self.state.used) + 1):
                call.request.priority = 0
            else:
                self._ahead = count
                used.ahead += count

    def _uncount(self) -> None:
        if not self._counted:
            return
        self._counted = False
        used, ahead = self.state.used[self.key], self._ahead
        if self._behind is None:
            used.close(ahead)
        else:
            self._behind.add_done_callback(lambda _: used.close(ahead))

    def _hold_live(self, size: int) -> bool:
        """Count bytes that are held until the request is over. False where that is too much for its API key."""
        if self._ended or not self.state.live.take(self.key, size):
            return False
        self._live += size
        return True

    def _leave(self) -> None:
        """The model that answered may be unloaded."""
        if self._entered and self.state.models is not None:
            self._entered = False
            self.state.models.leave()

    def on_finish(self) -> None:
        super().on_finish()
        self._end_body()

    def end_trace(self, trace: RequestTrace) -> None:
        super().end_trace(trace)
        if self._behind is None:
            trace.end_sessions()
        else:
            self._behind.add_done_callback(lambda _: trace.end_sessions())

    def _end_body(self) -> None:
        self._uncount()
        self._leave()
        self.state.live.give(self.key, self._live)
        self._live, self._ended = 0, True
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
        """Send a file. The last chunk goes only where all are as they were stored: else the client misses it.

        The file is open only while a chunk of it is read: a client that reads slowly holds one descriptor.
        """
        self._count()
        file, digest, at = answer.file, new_digest(), 0
        self.set_header("Content-Type", "application/octet-stream")
        self.set_header("Content-Length", str(file.bytes))
        self.set_header("Content-Disposition", f"attachment; filename*=UTF-8''{quote(file.filename)}")
        self.set_header("X-Content-Type-Options", "nosniff")
        while self.request.method != "HEAD" and at < file.bytes:
            data = await on_disk(_piece, answer.path, at, digest)
            at += len(data)
            if not data or at > file.bytes or (at == file.bytes and file.digest not in ("", digest.hexdigest())):
                if not self._headers_written:
                    raise damaged(changed_bytes(file.id))
                log.error("a download ends early: %s", changed_bytes(file.id))
                return self._socket.close()
            self.write(data)
            await self.flush()
        self.finish()

    async def _send_lines(self, answer: Lines) -> None:
        """Send lines. Where they cannot be read on, the connection ends before the answer does: the client notices."""
        self._count()
        self.set_header("Content-Type", "application/x-jsonl")
        try:
            async for data in answer.stream:
                self.write(data)
                await self.flush()
        except OSError as error:
            if isinstance(error, tornado.iostream.StreamClosedError) or not self._headers_written:
                raise
            log.error("an answer ends early: %s", error)
            return self._socket.close()
        self.finish()

    async def _generate(self, renderer: Renderer, call: Call, began: float) -> None:
        self.session, self.begun = renderer.session, True
        self.session.hold = self._hold_live
        self.session.start = began
        try:
            if self.gone:  # while the prompt was tokenised
                return
            if call.request.stream:
                await self._stream(Events(renderer.stream(), renderer.error))
            else:
                answer = await renderer.collect()
                for store, id in call.stored:
                    await store.saved(id, call.key)
                if not self.gone:
                    self.reply(answer)
        except tornado.iostream.StreamClosedError:
            self.gone = True
        finally:
            renderer.close()
            del self.session.hold  # they would hold each other until the next garbage collection
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
            self.failure = error.code or "error"
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


def too_much_live() -> ApiError:
    """The client's error if the requests of its API key hold too many bytes."""
    return ApiError(
        429,
        "the requests of this API key that are being answered hold all the memory that they may: wait for one",
        code="busy",
        retry_after=1,
    )


def _piece(path: Path, at: int, digest: blake2b) -> bytes:
    """The next bytes of a file, which its digest takes in. In a thread."""
    with open(path, "rb") as file:
        file.seek(at)
        data = file.read(PIECE)
    digest.update(data)
    return data
