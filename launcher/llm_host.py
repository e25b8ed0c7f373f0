"""The library's job: the ranks of an LLM, and the loop in a thread that speaks with them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

import msgspec

from .. import child_python, errors
from ..rank.options import Options
from ..rank.server.api_error import ApiError
from ..rank.server.batch.admission import Admission, enough
from ..rank.server.config import ServerConfig, model_settings
from ..rank.server.decoding import convert
from ..rank.server.engine_client import EngineClient
from ..rank.server.generation import Make
from ..rank.server.schema import Common
from ..rank.server.session import Session
from ..rank.server.text_engine import TextEngine
from .job import linux, secret_variables, server_process, supervisor
from .llm_types import Output, Piece, collect, pieces
from .loop_thread import LoopThread

Fields = dict[str, Any]  # of a request
DRAIN_PATIENCE = 5.0


class JobError(RuntimeError):
    """The job that computes has ended; `code` is its exit code (docs/exit-codes.md)."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


class JobHost:
    """The loop's thread, the socket to rank 0 and the supervisor's process. Knows no LLM, so that one can be freed."""

    def __init__(self, options: Options):
        self.options = options
        self._pid = os.getpid()  # a forked child has a copy of this object, but not the job
        self._closed = False
        self._directory = server_process.job_directory()
        self._thread = LoopThread("phalanx")  # where Ctrl-C cancels a call, the ranks stop computing its answers
        config = ServerConfig(
            **model_settings(options),
            link=os.path.join(self._directory, "link"),
            listen_fd=-1,
        )
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._room: Admission | None = None

    def start(self) -> None:
        """Listen, start the job, and wait until it is ready."""
        self._thread.run(self._listen())
        supervisor_request = supervisor.SupervisorRequest(self.options, self._config.link, os.getpid())
        self._process = subprocess.Popen(
            child_python.command("-m", "phalanx.launcher.job.supervisor"),
            env=secret_variables.without(os.environ)
            | {supervisor.REQUEST_ENV: msgspec.json.encode(supervisor_request).decode()},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno() if _has_fileno(sys.stderr) else None,
            process_group=0,  # Ctrl-C is for this program to handle
        )
        self._thread.run(self._ready())

    async def _listen(self) -> None:
        self._link = EngineClient(self._config.link)
        self._sessions = TextEngine(self._link, self._config)
        self._died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self._link.listen()

    async def _ready(self) -> None:
        assert self._process is not None
        loop = asyncio.get_running_loop()
        fd = linux.pidfd(self._process.pid)

        def died() -> None:
            loop.remove_reader(fd)
            os.close(fd)
            self._died.set_result(None)

        loop.add_reader(fd, died)
        try:
            await self._sessions.load()
        except errors.FatalError as error:
            raise ValueError(str(error)) from None
        except (OSError, ValueError) as error:
            raise ValueError(f"the tokenizer in {self.options.model} cannot be read: {error}") from None
        ready = asyncio.ensure_future(self._link.wait_ready())
        ends: list[asyncio.Future[Any]] = [ready, self._died]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done() or ready.exception() is not None:
            ready.cancel()
            raise await self._death()

    async def _death(self) -> JobError:
        """Why the job ended, once it has."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._died), 10)
        assert self._process is not None
        code = self._process.poll()
        code = errors.RANK_FAILED if code is None else supervisor.exit_code(code)
        fatal = self._link.fatal
        why = fatal.message if fatal is not None else supervisor.NAMES.get(code, "see the messages above")
        return JobError(f"the job ended with exit code {code}: {why}", code)

    def answer(self, bodies: list[Fields], kind: type[Common], make: Make) -> list[Output]:
        """Answer these requests; blocks."""
        with _in_words():
            return self._thread.run(self._answer_all(self._requests(bodies, kind), make))

    async def answer_async(self, bodies: list[Fields], kind: type[Common], make: Make) -> list[Output]:
        """The host for callers with a loop of their own."""
        with _in_words():
            return await self._thread.run_async(self._answer_all(self._requests(bodies, kind), make))

    async def stream_async(self, body: Fields, kind: type[Common], make: Make) -> AsyncGenerator[Piece, None]:
        """The deltas of the answers to a request, for callers with a loop of their own. Who reads slowly gets larger
        deltas. The ranks stop when the iterator is closed.
        """
        with _in_words():
            (request,) = self._requests([body], kind)
            found = self._pieces(request, make)

            async def following() -> Piece | None:
                return await anext(found, None)

            try:
                while (piece := await self._thread.run_async(following())) is not None:
                    yield piece
            except GeneratorExit:  # while the reader had a piece; one that is cancelled while it waits ends `found`
                if not self._closed:
                    await self._thread.run_async(found.aclose())
                raise

    def _requests(self, bodies: list[Fields], kind: type[Common]) -> list[Common]:
        if self._closed or self._pid != os.getpid():
            raise RuntimeError("this LLM is closed" if self._closed else "this LLM belongs to the parent process")
        if self._process is None:
            raise RuntimeError("this LLM has not started: use it in `async with`, or await its start()")
        return [convert(body, kind) for body in bodies]

    async def _answer_all(self, requests: list[Common], make: Make) -> list[Output]:
        tasks = [asyncio.ensure_future(self._answer(request, make)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _answer(self, request: Common, make: Make) -> Output:
        async with self._session(request, make) as session:
            return await collect(session, request.likeliest() >= 0)

    async def _pieces(self, request: Common, make: Make) -> AsyncGenerator[Piece, None]:
        async with self._session(request, make) as session:
            async for piece in pieces(session):
                yield piece

    @contextlib.asynccontextmanager
    async def _session(self, request: Common, make: Make) -> AsyncIterator[Session]:
        """A request's session, once there is room for it."""
        if self._room is None:
            ready = self._link.ready
            if ready is None:
                raise await self._death()
            self._room = Admission(enough(ready.max_num_seqs))  # what waits beyond that waits here
        taken = await self._room.take(request.sequences())
        try:
            with contextlib.closing(await self._sessions.generate(request, make)) as session:
                yield session
        except ApiError as error:
            if error.status == 503:
                raise await self._death() from None
            raise
        finally:
            self._room.give(taken)

    def close(self) -> None:
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        child = self._process
        if child is not None and child.poll() is None:
            if self._link.state == "ready":
                self._thread.loop.call_soon_threadsafe(self._link.drain)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(DRAIN_PATIENCE)
            for _ in range(2):  # the first asks, the second insists
                if child.poll() is None:
                    child.send_signal(signal.SIGTERM)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(0.2)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(DRAIN_PATIENCE)
            child.kill()
            child.wait()
        with contextlib.suppress(Exception):
            self._thread.run(self._end())
        self._thread.stop(DRAIN_PATIENCE)
        server_process.remove(self._directory)

    async def _end(self) -> None:
        self._link.close()
        self._sessions.close()


@contextlib.contextmanager
def _in_words() -> Iterator[None]:
    """A program gets a ValueError for a wrong request, not by a status."""
    try:
        yield
    except ApiError as error:
        raise ValueError(error.message) from None


def _has_fileno(stream: Any) -> bool:
    """Notebooks and test runners replace stderr by what is no file."""
    try:
        return stream.fileno() >= 0
    except (AttributeError, OSError, ValueError):
        return False
