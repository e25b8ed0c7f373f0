"""A batch job's requests on their way: from a line of the input to an entry of the journal."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from .... import errors
from ..api_error import ApiError
from ..embeddings import embed
from ..openai_format import ChatRenderer, Renderer, TextRenderer
from ..schema import ChatRequest, EmbeddingRequest, decode
from ..session import Session
from ..text_engine import TextEngine
from . import output
from .admission import opened
from .batch_input import Item, Request
from .deadline import Deadline
from .journal import ANSWERED, FAILED, Entry, Journal
from .progress import Counts

log = logging.getLogger("phalanx.batch")


class Answers:
    """Asks the ranks and writes down what they say. `fail` is told, code and reason, when the journal cannot."""

    def __init__(self, sessions: TextEngine, journal: Journal, pace: Deadline, fail: Callable[[int, str], None]):
        self.counts = Counts()  # by this start, on the disk
        self.under_way: set[asyncio.Task[None]] = set()
        self.records: set[asyncio.Task[None]] = set()  # being written
        self._sessions = sessions
        self._journal = journal
        self._pace = pace
        self._fail = fail
        self._open: set[Session] = set()

    @property
    def output_tokens(self) -> int:
        """What was generated so far, also of answers that are not complete."""
        return self.counts.output_tokens + sum(session.completion_tokens for session in self._open)

    def read(self, item: Item) -> Request | None:
        """The request of a line; what is none is written down as such."""
        if item.wrong:
            self._record(output.entry(item, FAILED), output.mistake(item))
            return None
        try:
            return decode(bytes(item.body), item.kind)  # type: ignore[type-var]
        except ApiError as error:
            self._record(output.entry(item, FAILED), output.failure(item, error))
            return None

    def limit(self, request: Request) -> int | None:
        """The most tokens that a sequence of it may generate, where that is known."""
        if isinstance(request, EmbeddingRequest):
            return 1
        limit = request.max_tokens
        if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
            limit = request.max_completion_tokens
        return limit or self._sessions.defaults.get("max_tokens")

    def begin(self, item: Item, request: Request) -> asyncio.Task[None]:
        """Done when there is an answer, which may not be written yet."""
        task = asyncio.ensure_future(self._answer(item, request))
        self.under_way.add(task)
        task.add_done_callback(self.under_way.discard)
        return task

    async def settle(self) -> None:
        """All that is finished gets onto the disk."""
        if self.records:
            await asyncio.wait(self.records)
        await self._journal.flush()

    async def _answer(self, item: Item, request: Request) -> None:
        """Ask until there is an answer: of a job that failed, and was started again, all is asked again."""
        while True:
            try:
                entry, content = await self._ask(item, request)
                break
            except ApiError as error:
                if error.status != 503:
                    entry, content = output.entry(item, FAILED), output.failure(item, error)
                    break
            except Exception as error:
                log.exception("request %s failed", item.custom_id)
                told = ApiError(500, f"internal error: {type(error).__name__}: {error}")
                entry, content = output.entry(item, FAILED), output.failure(item, told)
                break
            try:
                await self._sessions.link.wait_ready()
            except ApiError:
                return  # left for the next start
            await asyncio.sleep(0)
        self._record(entry, content)

    async def _ask(self, item: Item, request: Request) -> tuple[Entry, bytes]:
        if isinstance(request, EmbeddingRequest):
            began = time.monotonic()
            done = await embed(self._sessions, request)
            self._pace.add_embedding(time.monotonic() - began)
            return output.entry(item, ANSWERED, done.prompt_tokens), output.answer(item, done.id, done.body)
        async with opened(self._sessions, request) as session:
            assert self._sessions.text is not None
            kind: type[Renderer] = ChatRenderer if isinstance(request, ChatRequest) else TextRenderer
            self._open.add(session)
            try:
                body = await kind(session, self._sessions.text.tokenizer).collect()
            finally:
                self._open.discard(session)
            self._pace.add(session)
            entry = output.entry(item, ANSWERED, session.prompt_tokens, session.completion_tokens)
            return entry, output.answer(item, session.id, body)

    def _record(self, entry: Entry, content: bytes) -> None:
        task = asyncio.ensure_future(self._write(entry, content))
        self.records.add(task)
        task.add_done_callback(self.records.discard)

    async def _write(self, entry: Entry, content: bytes) -> None:
        try:
            await self._journal.add(entry, content)
        except errors.FatalError as stop:
            return self._fail(stop.code, str(stop))
        counts = self.counts
        counts.answered += entry.kind == ANSWERED
        counts.failed += entry.kind == FAILED
        counts.prompt_tokens += entry.prompt_tokens
        counts.output_tokens += entry.output_tokens
