"""One batch of a server, from the file of its requests to the files of its answers, through a journal."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ....errors import ERROR
from ..api_error import ApiError
from ..blocking import to_its_end
from ..session import Session
from ..text_engine import TextEngine
from . import output
from .answers import Answers
from .batch_input import Feed, Reader
from .deadline import Deadline
from .idle import IdleRoom
from .journal import FAILED, MAX_PENDING, Entry, Found, Journal, NoRoom
from .progress import Counts

LAST = (1 << 31) - 1  # the priority of all its requests: a live one goes first
MAX_REQUESTS = 50_000  # as OpenAI has it
MAX_MISTAKES = 100  # are told
ENDED = {  # why a request has no answer: code and message
    "expired": ("batch_expired", "the request was not answered before the batch's completion window was over"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request was answered"),
    "failed": ("batch_failed", "the batch failed before this request was answered"),
}


class Mistake(NamedTuple):
    """Why a file is no batch."""

    code: str
    message: str
    line: int | None = None

    def body(self) -> dict[str, str | int | None]:
        return {"code": self.code, "message": self.message, "line": self.line, "param": None}


def validate(path: str, endpoint: str) -> tuple[int, list[Mistake]]:
    """How many requests the file has, and what is wrong with its lines."""
    mistakes: list[Mistake] = []
    count = 0
    for item in Reader(path, {}):
        count += 1
        if item.wrong:
            mistakes.append(Mistake(item.code, item.wrong, item.line))
        elif item.route is not None and item.route.path != endpoint:
            told = f"url is {item.route.path!r}, and the batch is for {endpoint}"
            mistakes.append(Mistake("mismatched_endpoint", told, item.line))
        if count > MAX_REQUESTS:
            mistakes.append(Mistake("too_many_requests", f"more than {MAX_REQUESTS} requests", item.line))
        if len(mistakes) >= MAX_MISTAKES or count > MAX_REQUESTS:
            break
    if not count:
        mistakes.append(Mistake("empty_file", "the file has no request"))
    return count, mistakes


class StoredRun:
    """Answers the requests of `input`. Everything runs on the server's loop unless marked otherwise."""

    def __init__(
        self,
        input: Path,
        journal: Path,
        engine: TextEngine,
        used: Callable[[Entry], None],
        ended: Callable[[Session], None],
        room: Callable[[int], bool],
        owner: str,
    ):
        self.input = str(input)
        self.before = Found()  # by earlier servers
        self.given_up = 0  # requests that had no answer at the end
        self.failure = ""  # why it cannot go on
        self._full: NoRoom | None = None
        self._path = str(journal)
        self._engine = engine
        self._used = used  # told of each answer
        self._ended = ended  # told of each session
        self._has_room = room  # told of the journal's bytes
        self._owner = owner
        self._room = IdleRoom(engine.link)
        self._journal: Journal | None = None
        self._answers: Answers | None = None
        self._stopped = asyncio.Event()

    def counts(self) -> Counts:
        """Counts of finished requests, those of earlier servers included."""
        here = self._answers.counts if self._answers is not None else Counts()
        return Counts(*(getattr(self.before, name) + getattr(here, name) for name in Counts.__struct_fields__))

    def stop(self) -> None:
        """Give up what is under way."""
        self._stopped.set()

    @property
    def stopped(self) -> bool:
        return self._stopped.is_set()

    def _fail(self, code: int, reason: str) -> None:
        self._full = self._full or NoRoom(reason)
        self._stopped.set()

    async def run(self) -> None:
        """Until all is answered, or `stop`. Raises FatalError where the journal cannot be used; NoRoom: it is full."""
        self.before = await to_its_end(self._open)  # nothing ends the thread; what it opens is for `close`
        assert self._journal is not None
        told = self._fail, self._used, self._ended
        self._answers = Answers(self._engine, self._journal, Deadline(), *told, self._owner)
        feed = Feed(iter(Reader(self.input, self.before.finished)))
        work = asyncio.ensure_future(self._answer_all(feed))
        stopped = asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
        finally:
            feed.close()
            stopped.cancel()
            tasks = [work, *self._answers.under_way]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        await self._answers.settle()
        if self._full is not None:
            raise self._full
        if not work.cancelled():
            work.result()

    def _open(self) -> Found:
        self._journal = Journal(self._path, self.input, {})
        return self._journal.recover()

    async def _answer_all(self, feed: Feed) -> None:
        assert self._answers is not None and self._journal is not None
        async for item in feed:
            request = self._answers.read(item)
            if request is None:
                continue
            if not self._has_room(self._journal.size):
                self._fail(ERROR, "the answers of the batch have no room among its owner's files")
                await asyncio.Event().wait()  # until `run` ends it
            request.priority = LAST
            taken = await self._room.take(request.sequences())
            while self._journal.pending_bytes > MAX_PENDING:
                await asyncio.sleep(0.05)
            self._answers.begin(item, request).add_done_callback(functools.partial(self._give, taken))
        while waiting := self._answers.under_way | self._answers.records:
            await asyncio.wait(waiting)

    def _give(self, count: int, _: object) -> None:
        self._room.give(count)

    def finish(self, ended: str, answers: Path, errors: Path) -> int:
        """Write both files; what has no answer gets an error of ENDED. Returns how many requests there are.

        In a thread. Raises FatalError, of that NoRoom where the files cannot be written.
        """
        if self._journal is None:
            self._journal = Journal(self._path, self.input, {})
        found = self._journal.recover()
        seen = set()
        missing = []
        for item in Reader(self.input, {}):
            seen.add(item.key)
            if item.key not in found.finished:
                missing.append(item)
        if missing and ended in ENDED:
            code, message = ENDED[ended]
            told = ApiError(503, message, code=code)
            self._journal.append([(output.entry(one, FAILED), output.failure(one, told)) for one in missing])
            found.failed += len(missing)
            self.given_up = len(missing)
        count = len(seen)
        output.write(self._journal, seen, str(answers), str(errors), ordered=True)
        self.before, self._answers = found, None
        return count

    def close(self, remove: bool) -> None:
        """Leave the journal; remove it where its answers are in files. In a thread."""
        if self._journal is not None:
            if remove:
                self._journal.remove()
            self._journal.close()
            self._journal = None
