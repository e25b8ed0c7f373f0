"""A batch job's requests on their way: from a line of the input to an entry of the journal."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
import uuid
from collections.abc import Callable

from .... import errors
from ..api_error import ApiError
from ..decoding import decode
from ..http.routes import Call
from ..renderer import Renderer
from ..session import Session
from ..text_engine import TextEngine
from . import output
from .admission import Request
from .batch_input import Item
from .deadline import Deadline
from .journal import ANSWERED, FAILED, Entry, Journal
from .progress import Counts

log = logging.getLogger("phalanx.batch")
BUSY = 0.5  # seconds until a request is tried again that a full queue, or a server that drains or sleeps, has refused


class Answers:
    """Asks the ranks and records their answers. `fail` gets a code and a reason when the journal cannot;
    `written` gets each entry, and `ended` each session."""

    def __init__(
        self,
        engine: TextEngine,
        journal: Journal,
        deadline: Deadline,
        fail: Callable[[int, str], None],
        written: Callable[[Entry], None] = lambda entry: None,
        ended: Callable[[Session], None] = lambda session: None,
        owner: str = "",
    ):
        """owner: whose the requests are, as Call.owner has it."""
        self.counts = Counts()  # by this start, on the disk
        self.under_way: set[asyncio.Task[None]] = set()
        self.records: set[asyncio.Task[None]] = set()  # being written
        self._engine = engine
        self._journal = journal
        self._deadline = deadline
        self._fail = fail
        self._written = written
        self._ended = ended
        self._owner = owner
        self._open: set[Session] = set()

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far, those of incomplete answers included."""
        return self.counts.output_tokens + sum(session.completion_tokens for session in self._open)

    def read(self, item: Item) -> Request | None:
        """The request of a line; what is none is written down as such."""
        if item.wrong:
            self._record(output.entry(item, FAILED), output.mistake(item))
            return None
        assert item.route is not None and item.route.schema is not None
        try:
            return decode(bytes(item.body), item.route.schema, self._engine.config.strict)  # type: ignore[return-value]
        except ApiError as error:
            self._record(output.entry(item, FAILED), output.failure(item, error))
            return None

    def limit(self, request: Request) -> int | None:
        """The maximum of tokens that a sequence of it may generate, where that is known."""
        return request.limit() or self._engine.defaults.get("max_tokens")

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
            pause = 0.0
            try:
                entry, content = await self._ask(item, request)
                break
            except ApiError as error:
                if error.status not in (429, 503):
                    entry, content = output.entry(item, FAILED), output.failure(item, error)
                    break
                link = self._engine.link
                pause = BUSY if error.status == 429 or link.draining or link.asleep else 0.0
            except Exception as error:
                log.exception("request %s failed", item.custom_id)
                told = ApiError(500, f"internal error: {type(error).__name__}: {error}")
                entry, content = output.entry(item, FAILED), output.failure(item, told)
                break
            try:
                await self._engine.link.wait_ready()
            except ApiError:
                return  # left for the next start
            await asyncio.sleep(pause)
        self._record(entry, content)

    async def _ask(self, item: Item, request: Request) -> tuple[Entry, bytes]:
        assert item.route is not None
        began = time.monotonic()
        answer = item.route.prepare(Call(self._engine, request, batch_owner=self._owner))
        answer = await answer if inspect.isawaitable(answer) else answer
        if not isinstance(answer, Session | Renderer):
            self._deadline.add_embedding(time.monotonic() - began)
            entry = output.entry(item, ANSWERED, answer["usage"]["prompt_tokens"])
            return entry, output.answer(item, f"req-{uuid.uuid4().hex[:24]}", answer)
        if isinstance(answer, Session):
            assert item.route.render is not None and self._engine.text is not None
            answer = item.route.render(answer, request, self._engine.text.tokenizer)
        session = answer.session
        self._open.add(session)
        try:
            body = await answer.collect()
        finally:
            answer.close()
            self._open.discard(session)
            self._ended(session)
        self._deadline.add(session)
        entry = output.entry(item, ANSWERED, session.prompt_tokens, session.completion_tokens)
        return entry, output.answer(item, body["id"], body)

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
        self._written(entry)
