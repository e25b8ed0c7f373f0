"""Clients that behave badly, each in its way until the time is over; then a line of JSON counts each.

    python benchmarks/serving/misbehaving.py --port 2000 --clients 30 --seconds 60

benchmarks/crowd.py runs it with a polite crowd. --large also sends bodies of 10 MB. Only this machine's servers are
asked: the clients take what a server has.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import itertools
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

STAY = 5.0  # seconds that a client who does not read, or sends half, keeps its connection
LARGE = 10_000_000  # bytes
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST


def request(body: bytes, length: int | None = None) -> bytes:
    """A chat's request; `length` is claimed instead of the body's."""
    length = len(body) if length is None else length
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n" % length
    ) + body


def chat(text: str, count: int = 1, **more: object) -> bytes:
    """`count` messages of this text."""
    return json.dumps({"model": "any", "messages": [{"role": "user", "content": text}] * count, **more}).encode()


STREAM = request(chat("Tell me a long story.", stream=True, max_tokens=200, ignore_eos=True))


class Clients:
    """All of them; `done` counts what they did, by kind."""

    def __init__(self, port: int):
        self.port = port
        self.done: collections.Counter[str] = collections.Counter()
        words = "the quick brown fox jumps over a lazy dog "
        bodies = [chat(words * (LARGE // len(words))), chat("a" * LARGE), chat("x", 294_000)]
        bodies += [chat("x", metadata=[[]] * (LARGE // 4)), chat("x", stop=["a"] * (LARGE // 5))]
        self.bodies = itertools.cycle(map(request, bodies))

    @contextlib.asynccontextmanager
    async def connected(self, window: int = 0) -> AsyncIterator[tuple[asyncio.AbstractEventLoop, socket.socket]]:
        loop = asyncio.get_running_loop()
        with contextlib.closing(socket.socket()) as sock:
            sock.setblocking(False)
            if window:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
            await loop.sock_connect(sock, ("127.0.0.1", self.port))
            yield loop, sock

    async def slow(self) -> None:
        """Reads a few bytes at a time."""
        async with self.connected(4096) as (loop, sock):
            await loop.sock_sendall(sock, STREAM)
            while await loop.sock_recv(sock, 256):
                await asyncio.sleep(0.02)

    async def never(self) -> None:
        """Reads nothing."""
        async with self.connected(4096) as (loop, sock):
            await loop.sock_sendall(sock, STREAM)
            await asyncio.sleep(STAY)

    async def leaver(self) -> None:
        """Goes away in the middle of the stream."""
        async with self.connected() as (loop, sock):
            await loop.sock_sendall(sock, STREAM)
            for _ in range(3):
                await loop.sock_recv(sock, 1 << 16)

    async def resets(self) -> None:
        """The same, by a reset."""
        async with self.connected() as (loop, sock):
            await loop.sock_sendall(sock, STREAM)
            await loop.sock_recv(sock, 1 << 16)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)

    async def half(self) -> None:
        """Sends a part of what it announced."""
        async with self.connected() as (loop, sock):
            await loop.sock_sendall(sock, request(b'{"messages": "', 100_000))
            await asyncio.sleep(STAY)

    async def large(self) -> None:
        """Sends 10 MB; every other time it does not wait for the answer."""
        async with self.connected() as (loop, sock):
            await loop.sock_sendall(sock, next(self.bodies))
            self.done["10 MB sent"] += 1
            if self.done["10 MB sent"] % 2:
                status = (await loop.sock_recv(sock, 1 << 16)).partition(b" ")[2][:3].decode()
                self.done[f"10 MB answered {status or 'by closing'}"] += 1

    async def repeat(self, kind: Callable[[], Awaitable[None]]) -> None:
        """A server may close the connection of such a client whenever it likes."""
        name = kind.__name__
        while True:
            try:
                await kind()
                self.done[name] += 1
            except OSError:
                self.done[f"{name}, cut off"] += 1
            await asyncio.sleep(0.05)


async def behave(port: int, count: int, seconds: float, large: bool) -> dict[str, int]:
    """Results of `count` clients."""
    clients = Clients(port)
    kinds = [clients.slow, clients.never, clients.leaver, clients.resets, clients.half]
    kinds += [clients.large] if large else []
    tasks = [asyncio.ensure_future(clients.repeat(kind)) for kind, _ in zip(itertools.cycle(kinds), range(count))]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return dict(clients.done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--clients", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--large", action="store_true", help="a sixth of them send bodies of 10 MB")
    asked = parser.parse_args()
    print(json.dumps(asyncio.run(behave(asked.port, asked.clients, asked.seconds, asked.large))), flush=True)


if __name__ == "__main__":
    main()
