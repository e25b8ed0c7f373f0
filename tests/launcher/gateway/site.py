"""A gateway in this process, and fake jobs that answer as a test has them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from phalanx.launcher.gateway.app import Gateway, make_app
from phalanx.launcher.gateway.job_table import JobTable
from phalanx.rank.server import server_registry
from phalanx.rank.server.http.connection import MAX_HEAD, Server

Behaviour = Callable[["Request", asyncio.StreamWriter], Awaitable[None]]


class Request:
    """A request that a job was sent."""

    def __init__(self, method: str, target: str, headers: dict[str, str], body: bytes):
        self.method, self.target, self.headers, self.body = method, target, headers, body


async def whole(status: str, body: Any, writer: asyncio.StreamWriter, more: str = "") -> None:
    """Answer at once."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\n{more}\r\n".encode() + text)


async def begin_stream(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class FakeJob:
    """A job that is in the registry, and a server at its address."""

    def __init__(self, place: Path, name: str, behaviour: Behaviour | None = None, **entry: Any):
        self.path = place / f"{name}.json"
        self.name = name
        self.requests: list[Request] = []
        self.left = 0  # clients that have gone before their answer was whole
        self.healthy = True
        self._behaviour = behaviour or self._say_name
        self._given = {"model": "m", "models": ["m"], "state": "ready"} | entry
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def _say_name(self, request: Request, writer: asyncio.StreamWriter) -> None:
        await whole("200 OK", {"job": self.name}, writer)

    async def open(self) -> FakeJob:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        self.say()
        return self

    def say(self, **entry: Any) -> None:
        """Write the registry's file."""
        self._given |= entry
        job = server_registry.RegisteredServer(
            **{
                "url": f"http://127.0.0.1:{self.port}",
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "start": server_registry.start_of(os.getpid()),
                "pids": server_registry.namespace(),
                "beat": time.time(),
                **self._given,
            }
        )
        server_registry.write(self.path, job)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            first, *lines = head.strip().split("\r\n")
            method, target, _ = first.split(" ")
            headers = {name.lower(): value.strip() for name, value in (line.split(":", 1) for line in lines)}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            if target == "/health":
                await whole("200 OK" if self.healthy else "500 no", {"status": "ready"}, writer)
            else:
                request = Request(method, target, headers, body)
                self.requests.append(request)
                gone = asyncio.ensure_future(reader.read())
                answering = asyncio.ensure_future(self._behaviour(request, writer))  # type: ignore[arg-type]
                await asyncio.wait([gone, answering], return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():
                    self.left += 1
                    answering.cancel()
                gone.cancel()
            with contextlib.suppress(OSError):
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    def kill(self) -> None:
        """Nobody listens any more, and open connections are cut; the registry still has it."""
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        self.kill()
        self.path.unlink(missing_ok=True)
        await asyncio.sleep(0)


class Site:
    """A gateway at `port`, whose registry is `place`."""

    def __init__(self, place: Path, hold: float = 20.0, open_to_all: bool = False):
        self.place = place
        self.table = JobTable(place, socket.gethostname(), open_to_all)
        self.gateway = Gateway(self.table, hold)
        self.jobs: list[FakeJob] = []

    async def job(self, name: str, behaviour: Behaviour | None = None, **entry: Any) -> FakeJob:
        """A new job that the gateway knows of."""
        made = await FakeJob(self.place, name, behaviour, **entry).open()
        self.jobs.append(made)
        await self.table.refresh()
        return made

    async def ask(
        self, body: Any = None, path: str = "/v1/chat/completions", method: str = "", **headers: str
    ) -> Answer:
        """Send a request and read the whole answer."""
        async with self.connection() as (reader, writer):
            await self.send(writer, body, path, method, **headers)
            return await read(reader)

    async def send(
        self, writer: asyncio.StreamWriter, body: Any = None, path: str = "/v1/chat/completions", method: str = "",
        **headers: str,
    ) -> None:  # fmt: skip
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        method = method or ("POST" if data else "GET")
        lines = {"Host": "gateway.site:80", "Content-Length": str(len(data)), "Connection": "close"}
        lines |= {name.replace("_", "-"): value for name, value in headers.items()}
        text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        writer.write(f"{method} {path} HTTP/1.1\r\n{text}\r\n".encode() + data)
        await writer.drain()

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield reader, writer
        finally:
            writer.close()

    async def __aenter__(self) -> Site:
        sock = socket.create_server(("127.0.0.1", 0))
        sock.setblocking(False)
        self.port = sock.getsockname()[1]
        self._server = Server(make_app(self.gateway), max_body_size=1 << 30, max_header_size=MAX_HEAD)
        self._server.listen_on(sock)
        self._watch = asyncio.ensure_future(self.gateway.watch(0.05))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watch.cancel()
        self._server.stop()
        for job in self.jobs:
            await job.close()
        self.table.close()


class Answer(msgspec.Struct):
    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool = True  # it came to its end

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def read_head(reader: asyncio.StreamReader) -> Answer:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, value in (line.split(":", 1) for line in lines)}
    return Answer(int(first.split(" ")[1]), headers, b"")


async def read(reader: asyncio.StreamReader) -> Answer:
    answer = await read_head(reader)
    if answer.headers.get("transfer-encoding") == "chunked":
        answer.whole = False
        while line := await reader.readline():
            size = int(line, 16)
            try:
                answer.body += (await reader.readexactly(size + 2))[:size]
            except asyncio.IncompleteReadError as error:
                answer.body += error.partial
                break
            if not size:
                answer.whole = True
                break
    else:
        answer.body = await reader.read()
        answer.whole = len(answer.body) == int(answer.headers.get("content-length", len(answer.body)))
    return answer
