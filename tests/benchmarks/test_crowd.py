"""benchmarks/crowd.py: a small crowd for a moment, and what it makes of its figures."""

import asyncio
import json
import re
import socket

import pytest
from phalanx.benchmarks import crowd
from phalanx.benchmarks.serving import misbehaving

from .. import retries, word_server

pytestmark = [pytest.mark.timeout(120), retries.CLOCKS]


@pytest.mark.long
def test_a_small_crowd(capsys, tmp_path):
    """The times are the machine's, which may be busy; all else has to hold."""
    asked = {"streams": 8, "misbehaving": 6, "seconds": 2, "tokens": 5, "step-ms": 20, "json": tmp_path / "out.json"}
    code = crowd.main([f"--{name}={value}" for name, value in asked.items()])
    found = json.loads((tmp_path / "out.json").read_text())
    timely, whole = found["kept"].pop("first token: median at most twice"), found["kept"]
    assert all(whole.values()), found
    assert code == (0 if timely else 1)
    for run in ("without_large", "with_large"):
        assert found[run]["whole_streams"] >= 8
        assert 0 < found[run]["median_first_token_s"] < 10
    did = found["with_large"]["misbehaving"]
    assert did["10 MB answered 400"] and did["leaver"] and did["resets"]
    assert "10 MB sent" not in found["without_large"]["misbehaving"]
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1]) == json.loads((tmp_path / "out.json").read_text())
    assert "median first token" in out and "kept: every polite stream" in out


def test_a_broken_stream_breaks_the_promise(monkeypatch, capsys):
    run = crowd.Run(streams=1, first=[1.0], peak=40.0)
    broken = crowd.Run(streams=1, errors=["2 tokens came"], first=[3.0], peak=400.0)
    runs = iter([run, broken])

    async def crowded(asked, server, large, alone):
        return next(runs)

    async def left(*_):
        return {"sequences_open": 1.0, "files": 0, "mb": 0.0}

    monkeypatch.setattr(crowd, "crowd", crowded)
    monkeypatch.setattr(crowd, "settled", left)
    with word_server.running() as running:
        word_server.fresh(running)
        monkeypatch.setattr(crowd, "polite", lambda *_: asyncio.sleep(0))
        assert crowd.main(["--port", str(running.port)]) == 1
    assert capsys.readouterr().out.count("NOT KEPT") == 4


def test_no_server_there(capsys):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    assert crowd.main(["--port", str(port)]) == 1
    assert f"port {port}" in capsys.readouterr().err


def test_a_server_that_says_less_than_it_should():
    """The word server tells no token ids: no stream counts as whole."""
    with word_server.running() as running:
        word_server.fresh(running)
        run = crowd.Run()
        client = crowd.Client(f"http://127.0.0.1:{running.port}", "EMPTY", 5)
        asyncio.run(crowd.polite(client, 0, 2, crowd.time.perf_counter() + 0.05, run))
    assert not run.streams and re.search("0 tokens.*usage.*says 2", run.errors[0])


def test_rude_requests_claim_what_they_do():
    clients = misbehaving.Clients(1)
    bodies = [next(clients.bodies) for _ in range(5)]
    assert all(9_900_000 < len(body) < 10_100_000 for body in bodies)
    head, _, body = misbehaving.request(b"{", 100).partition(b"\r\n\r\n")
    assert b"Content-Length: 100" in head
    assert body == b"{"
