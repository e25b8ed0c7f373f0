"""A server that answers every chat at a set rate with prepared bytes: what the client itself can carry.

    python benchmarks/serving/dummy.py --p 2999 --rate 100      then benchmarks/serve.py --port 2999 --concurrency 256 …

It counts words as tokens. A token costs it about half of what it costs the client, so with a core for each the client
is the first to be full.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def _event(choices: list, **more: object) -> bytes:
    chunk = {
        "id": "chatcmpl-0123456789abcdef0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "dummy",
        "choices": choices,
        **more,
    }
    data = b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


TOKEN = _event([{"index": 0, "delta": {"content": " word"}, "finish_reason": None}], usage=None)
LAST = _event([{"index": 0, "delta": {}, "finish_reason": "length"}], usage=None)
STREAMS: dict[asyncio.Transport, list[int]] = {}  # to the number of its tokens: left, all, in its prompt


class Dummy(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.data = b""

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, _, body = self.data.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        if len(body) < length:
            return
        if not length:
            self._json({"object": "list", "data": [{"id": "dummy", "object": "model"}]})
            return
        request = json.loads(body)
        words = sum(len(m["content"].split()) for m in request["messages"])
        if request.get("stream"):
            self.transport.write(HEAD)
            STREAMS[self.transport] = [request["max_tokens"], request["max_tokens"], words]
        else:
            self._json({"choices": [], "usage": {"prompt_tokens": words, "completion_tokens": 1}})

    def _json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    def connection_lost(self, exc: Exception | None) -> None:
        STREAMS.pop(self.transport, None)


async def pace(rate: float) -> None:
    """A token for every stream, `rate` times a second; late rounds are caught up with."""
    due = time.perf_counter()
    while True:
        due = max(due + 1 / rate, time.perf_counter() - 1)
        await asyncio.sleep(max(due - time.perf_counter(), 0))
        for transport, numbers in list(STREAMS.items()):
            transport.write(TOKEN)
            numbers[0] -= 1
            if not numbers[0]:
                usage = {"prompt_tokens": numbers[2], "completion_tokens": numbers[1]}
                done = b"data: [DONE]\n\n"
                transport.write(LAST + _event([], usage=usage) + b"%x\r\n%s\r\n0\r\n\r\n" % (len(done), done))
                del STREAMS[transport]


async def main() -> None:
    parser = argparse.ArgumentParser(description="A server that answers at a set rate, to measure the client.")
    parser.add_argument("--p", "--port", dest="port", type=int, default=2999)
    parser.add_argument("--rate", type=float, default=100, help="tokens a second of each stream")
    args = parser.parse_args()
    server = await asyncio.get_running_loop().create_server(Dummy, "127.0.0.1", args.port, backlog=1024)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await pace(args.rate)


if __name__ == "__main__":
    asyncio.run(main())
