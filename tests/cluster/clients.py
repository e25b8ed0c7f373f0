"""Clients of a gateway, as a program: `clients.py URL KEY COUNT` asks without a pause until SIGTERM, and then writes
what has come of it as JSON.

ok         a whole answer, or a stream that ended with [DONE]
again      an error that says to send the request again: an event in a stream, or 502 job_lost
unheld     503 no_job: nobody was ready for as long as the gateway holds requests
no_gateway nobody listened, or the connection ended, as while a gateway that was killed is started again
broken     a stream that ended otherwise, and any other answer: there should be none

`odd` has the broken ones, and requests that were not answered PATIENCE seconds after SIGTERM.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import random
import signal
import sys
import time
import urllib.parse
from typing import Any

QUICK = 0.05  # seconds before a client that found nobody asks again
PATIENCE = 150.0  # seconds for the last answers; a gateway may hold a request for 60, and the machine may be busy


class Clients:
    """All clients, and what has come of their requests."""

    def __init__(self, url: str, key: str):
        parts = urllib.parse.urlsplit(url)
        self.host, self.port, self.key = parts.hostname, parts.port, key
        self.counts: collections.Counter[str] = collections.Counter()
        self.odd: list[str] = []
        self.doing: dict[int, tuple[float, str]] = {}  # of each client: since when, and what
        self.longest = 0.0  # seconds of a request that was answered
        self.ending = False

    async def run(self, number: int) -> None:
        """One client."""
        choice = random.Random(number)
        while not self.ending:
            began = time.monotonic()
            outcome = await self._ask(number, choice)
            self.counts[outcome.partition(":")[0]] += 1
            if outcome.startswith("broken"):
                self.odd.append(outcome)
            if outcome == "ok":
                self.longest = max(self.longest, time.monotonic() - began)
            elif outcome == "no_gateway":
                await asyncio.sleep(QUICK)

    async def _ask(self, number: int, choice: random.Random) -> str:
        stream = choice.random() < 0.5
        body = {
            "messages": [{"role": "user", "content": f"client {number}"}],
            "max_tokens": choice.choice((4, 30, 200)),
            "stream": stream,
            "ignore_eos": True,
        }
        self._do(number, "connecting")
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port)
        except OSError:
            return "no_gateway"
        try:
            return await self._exchange(number, reader, writer, body)
        except (OSError, asyncio.IncompleteReadError):
            return "no_gateway"
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _exchange(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: Any
    ) -> str:
        self._do(number, f"waiting for the head of {body}")
        data = json.dumps(body).encode()
        writer.write(
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: "
            f"{len(data)}\r\nContent-Type: application/json\r\nAuthorization: Bearer {self.key}\r\n\r\n".encode()
            + data
        )
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        status = int(head.split(" ", 2)[1])
        self._do(number, f"reading the rest of {body} after {head!r}")
        chunked = "transfer-encoding: chunked" in head.lower()
        got, whole = await (self._chunks(reader) if chunked else self._rest(reader, head))
        if not whole:
            return "no_gateway"
        if status == 200 and body["stream"]:
            if got.endswith(b"data: [DONE]\n\n"):
                return "ok"
            last = got.rstrip().rpartition(b"\n\n")[2]
            return "again" if b'"error"' in last and b"again" in last else f"broken: {got[-200:]!r}"
        answer = json.loads(got)
        if status == 200:
            return "ok" if answer["usage"]["completion_tokens"] == body["max_tokens"] else f"broken: {answer}"
        code = answer["error"]["code"]
        if code == "no_job":
            return "unheld"
        if "again" in answer["error"]["message"]:
            return "again"
        return f"broken: {status} {answer}"

    def _do(self, number: int, what: str) -> None:
        self.doing[number] = time.monotonic(), what

    async def _chunks(self, reader: asyncio.StreamReader) -> tuple[bytes, bool]:
        got = b""
        with contextlib.suppress(asyncio.IncompleteReadError, OSError, ValueError):
            while size := int(await reader.readline(), 16):
                got += (await reader.readexactly(size + 2))[:size]
            return got, True
        return got, False

    async def _rest(self, reader: asyncio.StreamReader, head: str) -> tuple[bytes, bool]:
        length = next(
            int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-length")
        )
        try:
            return await reader.readexactly(length), True
        except asyncio.IncompleteReadError as error:
            return error.partial, False


async def main(url: str, key: str, count: int) -> None:
    clients = Clients(url, key)
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.set)
    running = [asyncio.ensure_future(clients.run(number)) for number in range(count)]
    await asked.wait()
    clients.ending = True
    await asyncio.wait(running, timeout=PATIENCE)
    for number, one in enumerate(running):
        if not one.done():
            since, what = clients.doing[number]
            clients.odd.append(f"stuck for {time.monotonic() - since:.0f} s, {what}")
        elif error := one.exception():
            clients.odd.append(f"{error!r} while {clients.doing[number][1]}")
    print(json.dumps({**clients.counts, "odd": clients.odd[:20], "longest": round(clients.longest, 1)}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
