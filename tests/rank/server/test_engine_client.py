"""The link with rank 0, without HTTP."""

import asyncio
import contextlib
import os
import signal
import socket
import stat
import sys
import time

import pytest
from phalanx import errors
from phalanx.rank import protocol
from phalanx.rank.server import engine_client
from phalanx.rank.server.api_error import ApiError
from phalanx.rank.server.engine_client import EngineClient

from ... import retries

pytestmark = pytest.mark.timeout(60)


class Scheduler:
    """Rank 0's end, its messages sent by hand."""

    def __init__(self, path):
        self.path = path

    async def __aenter__(self):
        self.reader, self.writer = await asyncio.open_unix_connection(self.path)
        self.frames = protocol.Frames(protocol.FromServer)
        return self

    async def __aexit__(self, *_):
        self.writer.close()

    def send(self, *messages):
        for message in messages:
            self.writer.write(protocol.frame(message))

    async def receive(self):
        messages = []
        while not messages:
            messages = self.frames.feed(await self.reader.read(1 << 16))
        return messages


READY = protocol.Ready(max_model_len=64, vocab_size=100, kv_tokens=640, block_size=16, max_num_seqs=4, ranks=2)


def request(id):
    return protocol.Request(id, protocol.pack_u32([1, 2]), protocol.SamplingParams(max_tokens=5))


def run(tmp_path, test, **options):
    async def main():
        link = EngineClient(str(tmp_path / "link"), **options)
        await link.listen()
        try:
            async with asyncio.timeout(10), Scheduler(link.path) as scheduler:
                await test(link, scheduler)
        finally:
            link.close()

    asyncio.run(main())


def test_only_this_user_may_connect(tmp_path):
    async def test(link, scheduler):
        assert stat.S_IMODE(os.stat(link.path).st_mode) == 0o600

    run(tmp_path, test)
    assert not os.path.exists(tmp_path / "link")


def test_another_user_is_refused(tmp_path, monkeypatch, caplog):
    async def test(link, scheduler):
        assert await scheduler.reader.read(1) == b"" and link.state == "loading"

    monkeypatch.setattr(os, "getuid", lambda: 12345)
    run(tmp_path, test)
    assert "user 12345's job" in caplog.text


def test_heartbeats_come_while_nothing_else_does(tmp_path):
    async def test(link, scheduler):
        for _ in range(3):
            assert set(await scheduler.receive()) == {protocol.Heartbeat()}

    run(tmp_path, test, timeout=0.4)


RANK_0 = """
import os, socket, sys, time
from phalanx.rank import protocol
link = socket.socket(socket.AF_UNIX)
link.connect(sys.argv[1])
for _ in range(15):
    link.sendall(protocol.frame(protocol.Heartbeat()))
    time.sleep(0.1)
os.kill(os.getpid(), 19)
"""


@retries.CLOCKS
def test_a_rank_0_that_stops_is_killed_and_named(tmp_path, monkeypatch):
    """But not while its heartbeats come, nor where it has never sent any."""
    monkeypatch.setattr(engine_client, "GRACE", 0.2)

    async def main():
        silent = EngineClient(str(tmp_path / "silent"), timeout=0.2)
        await silent.listen()
        async with Scheduler(silent.path):
            await asyncio.sleep(1)
            assert silent.fatal is None and silent.state == "loading"
        silent.close()
        link = EngineClient(str(tmp_path / "link"), timeout=0.8)
        await link.listen()
        lost = asyncio.Event()
        link.on_lost = lost.set
        rank = await asyncio.create_subprocess_exec(sys.executable, "-c", RANK_0, link.path)
        try:
            began = time.monotonic()
            async with asyncio.timeout(60):
                await lost.wait()
            assert time.monotonic() - began > 1.5
            assert link.fatal.code == errors.RANK_STUCK and str(rank.pid) in link.fatal.message
            assert await rank.wait() == -signal.SIGKILL
        finally:
            with contextlib.suppress(ProcessLookupError):
                rank.kill()
            link.close()

    asyncio.run(main())


def test_unread_deltas_come_together(tmp_path):
    async def test(link, scheduler):
        scheduler.send(READY)
        assert await link.wait_ready() == READY
        stream = link.submit([request("a"), request("b")])
        assert [message.id for message in await scheduler.receive()] == ["a", "b"]
        scheduler.send(
            protocol.Deltas([protocol.Delta("a", [1])]),
            protocol.Deltas([protocol.Delta("a", [2]), protocol.Delta("b", [3])]),
            protocol.Deltas([protocol.Delta("zzz", [9])], protocol.Stats(running=2)),
        )
        while link.stats.running != 2:
            await asyncio.sleep(0.01)
        assert [(delta.id, delta.tokens) for delta in await anext(stream)] == [("a", [1]), ("a", [2]), ("b", [3])]
        last = [protocol.Delta("a", [4], finish="stop"), protocol.Delta("b", [5], finish="length")]
        scheduler.send(protocol.Deltas(last))
        assert len(await anext(stream)) == 2 and link.open_sequences == 0
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    run(tmp_path, test)


def test_abort(tmp_path):
    async def test(link, scheduler):
        scheduler.send(READY)
        await link.wait_ready()
        stream = link.submit([request("a"), request("b")])
        await scheduler.receive()
        stream.abort(["a", "unknown"])
        assert await scheduler.receive() == [protocol.Abort(["a"])]
        scheduler.send(protocol.Deltas([protocol.Delta("a", [1]), protocol.Delta("b", [2])]))  # a's was on its way
        assert [delta.id for delta in await anext(stream)] == ["b"]
        waiting = asyncio.ensure_future(anext(stream, None))
        await asyncio.sleep(0)
        stream.abort()
        assert await scheduler.receive() == [protocol.Abort(["b"])]
        assert await waiting is None and link.open_sequences == 0
        stream.abort()

    run(tmp_path, test)


def test_a_lost_lead_fails_what_is_open(tmp_path):
    async def test(link, scheduler):
        lost = []
        link.on_lost = lambda: lost.append(link.state)
        scheduler.send(READY)
        await link.wait_ready()
        stream = link.submit([request("a")])
        scheduler.send(protocol.Deltas([protocol.Delta("a", [1])]))
        scheduler.writer.close()
        while not lost:
            await asyncio.sleep(0.01)
        assert [delta.tokens for delta in await anext(stream)] == [[1]]  # what came is not lost
        with pytest.raises(ApiError, match="the job ended") as caught:
            await anext(stream)
        assert caught.value.status == 503 and lost == ["failed"]
        with pytest.raises(ApiError, match="the job ended"):
            link.submit([request("b")])
        with pytest.raises(ApiError, match="the job ended"):
            await link.wait_ready()

    run(tmp_path, test)


def test_wait_ready_ends_when_the_job_fails_while_loading(tmp_path):
    async def test(link, scheduler):
        waiting = asyncio.ensure_future(link.wait_ready())
        scheduler.send(protocol.Fatal("no such file: model.safetensors", 3))
        await asyncio.sleep(0.05)  # longer than a read takes, so that the end is not read together with the word
        scheduler.writer.close()
        with pytest.raises(ApiError, match="file.*model.safetensors"):
            await waiting
        assert link.fatal.code == 3

    run(tmp_path, test)


@pytest.mark.parametrize("by_server", [True, False])
def test_drain(tmp_path, by_server):
    async def test(link, scheduler):
        scheduler.send(READY)
        await link.wait_ready()
        if by_server:
            link.drain()
            assert await scheduler.receive() == [protocol.Drain()]
        else:
            scheduler.send(protocol.Draining())
            while link.state != "draining":
                await asyncio.sleep(0.01)
        with pytest.raises(ApiError, match="shutting down"):
            link.submit([request("a")])

    run(tmp_path, test)


def test_what_a_drain_waits_for_is_said(tmp_path, caplog):
    async def test(link, scheduler):
        scheduler.send(READY)
        await link.wait_ready()
        link.submit([request("a"), request("b")])  # two choices of one request
        link.submit([request("c")])
        await scheduler.receive()
        link.drain()
        assert "2" in caplog.messages[-1] and "open" in caplog.messages[-1]
        link.abort(["c"])
        scheduler.send(protocol.Deltas([protocol.Delta(one, [1], finish="stop") for one in "ab"], None))
        while "drained" not in caplog.messages[-1]:
            await asyncio.sleep(0.01)

    caplog.set_level("INFO")
    run(tmp_path, test)
    assert sum("drained" in one for one in caplog.messages) == 1


def test_drain_before_a_lead_is_there_reaches_it(tmp_path):
    async def main():
        link = EngineClient(str(tmp_path / "link"))
        await link.listen()
        link.drain()
        async with asyncio.timeout(10), Scheduler(link.path) as scheduler:
            assert await scheduler.receive() == [protocol.Drain()]
        link.close()

    asyncio.run(main())


def test_a_second_lead_is_refused(tmp_path, caplog):
    async def test(link, scheduler):
        scheduler.send(READY)
        await link.wait_ready()
        async with Scheduler(link.path) as other:
            assert await other.reader.read(1) == b""
        assert link.state == "ready"

    run(tmp_path, test)
    assert "connected already" in caplog.text


def test_noise_is_no_scheduler(tmp_path, caplog):
    async def test(link, scheduler):
        scheduler.writer.write(b"GET / HTTP/1.1\r\n\r\n" * 10)
        assert await scheduler.reader.read(1) == b""
        while link.state != "failed":
            await asyncio.sleep(0.01)

    run(tmp_path, test)
    assert "no message" in caplog.text


def test_a_path_that_is_too_long(tmp_path):
    async def main():
        await EngineClient(str(tmp_path / ("x" * 120))).listen()

    with pytest.raises(OSError, match="107"):
        asyncio.run(main())


def test_a_stale_socket_is_replaced(tmp_path):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "link"))

    async def test(link, scheduler):
        assert link.state == "loading"

    run(tmp_path, test)


def test_an_unloaded_model_is_waited_for_without_holding_up_the_loop(tmp_path):
    async def test(link, scheduler):
        scheduler.send(READY)
        await link.wait_ready()
        unloading = asyncio.ensure_future(link.switch(0, ""))
        waiting = asyncio.ensure_future(link.wait_ready())
        await asyncio.sleep(0)
        scheduler.send(protocol.Unloaded())
        assert await unloading == "" and link.state == "unloaded"
        for _ in range(10):
            await asyncio.sleep(0)
        assert not waiting.done()
        scheduler.send(READY)
        assert await waiting == READY

    run(tmp_path, test)
