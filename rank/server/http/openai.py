"""OpenAI's endpoints: chat completions, completions, embeddings, models."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import msgspec
import tornado.http1connection
import tornado.iostream

from ..api_error import ApiError
from ..embeddings import embed
from ..openai_format import ChatRenderer, Renderer, TextRenderer
from ..schema import ChatRequest, CompletionRequest, EmbeddingRequest
from ..session import Session
from .handler import BodyHandler, Handler

KEEP_ALIVE = b": keep-alive\n\n"


class Generate(BodyHandler):
    """Runs a session and writes its answer, whole or as server-sent events."""

    session: Session | None = None
    gone = False  # the client closed the connection

    async def start(self) -> Renderer:
        raise NotImplementedError

    async def post(self) -> None:
        began = time.monotonic()
        reply = await self.run(self.start())
        if reply is None:
            return
        self.release()
        self.session = reply.session
        self.session.start = began
        try:
            if self.gone:  # while the prompt was tokenised
                return
            if reply.request.stream:
                await self._stream(reply)
            else:
                answer = await reply.collect()
                if not self.gone:
                    self.reply(answer)
        except tornado.iostream.StreamClosedError:
            self.gone = True
        finally:
            self.session.close()
            self.state.metrics.session(self.session, self.gone)

    def on_connection_close(self) -> None:
        super().on_connection_close()
        self.gone = True
        if self.session is not None:
            self.session.close()

    @property
    def _socket(self) -> tornado.iostream.IOStream:
        assert isinstance(self.request.connection, tornado.http1connection.HTTP1Connection)
        return self.request.connection.stream

    async def _stream(self, reply: Renderer) -> None:
        """Tokens that come while the client has not taken the last event go into the next one together."""
        ticker = asyncio.ensure_future(self._keep_alive())
        try:
            async for updates in reply.session:
                data = reply.chunks(updates)
                if data:
                    await self._send(data)
            if not self.gone:
                await self._send(reply.last())
        except tornado.iostream.StreamClosedError:
            raise
        except Exception as error:
            if not self._headers_written:
                raise
            if not isinstance(error, ApiError):
                self.log_exception(type(error), error, error.__traceback__)
                error = self.internal_error()
            # The status is out already: the error is an event, and no [DONE] follows.
            await self._send(b"data: " + msgspec.json.encode(error.body()) + b"\n\n")
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


class Chat(Generate):
    """The answer to a conversation, whole or as server-sent events."""

    async def start(self) -> Renderer:
        sessions = self.state.sessions
        session = await sessions.chat(self.decoded(ChatRequest))
        assert sessions.text is not None
        return ChatRenderer(session, sessions.text.tokenizer)


class Completions(Generate):
    """The continuation of a text or of token ids, whole or as server-sent events."""

    async def start(self) -> Renderer:
        sessions = self.state.sessions
        session = await sessions.completion(self.decoded(CompletionRequest))
        assert sessions.text is not None
        return TextRenderer(session, sessions.text.tokenizer)


class Embeddings(BodyHandler):
    """Vectors of texts or of token ids."""

    async def post(self) -> None:
        ended = partial(self.state.metrics.embedding, time.monotonic())
        request = self.decoded(EmbeddingRequest)
        done = await self.run(embed(self.state.sessions, request, ended, self.release))
        if done is not None:
            self.reply(done.body)


class Models(Handler):
    """The model under each of its names, with `max_model_len`."""

    def get(self) -> None:
        self.reply({"object": "list", "data": [describe(self, name) for name in self.state.sessions.names]})


class Model(Handler):
    """The same of one name; 404 for another."""

    def get(self, name: str) -> None:
        names = self.state.sessions.names
        if name not in names:
            raise ApiError(
                404,
                f"the model {name!r} does not exist; this server has {', '.join(names)}",
                "model",
                "model_not_found",
            )
        self.reply(describe(self, name))


def describe(handler: Handler, name: str) -> dict:
    """A model's entry; all names after the first are other names of the same model."""
    state = handler.state
    real = state.sessions.names[0]
    return {
        "id": name,
        "object": "model",
        "created": state.started,
        "owned_by": "phalanx",
        "max_model_len": state.link.ready.max_model_len if state.link.ready else None,
        "root": real,
        "parent": None if name == real else real,
        "permission": [],
    }
