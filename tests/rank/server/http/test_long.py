"""Requests of megabytes: refused where they cannot fit, in nobody's way where they can, and forgotten afterwards."""

import gc
import gzip
import json
import random
import socket
import threading
import time

import psutil
import pytest
from phalanx.rank import protocol
from phalanx.rank.server.http import handler
from phalanx.rank.server.text_engine import LARGE, THREADS
from phalanx.rank.server.text_process import text_facts

from .... import retries
from .test_server import read_all, send

pytestmark = [pytest.mark.alone, pytest.mark.timeout(60), retries.CLOCKS]
ROOM = protocol.Ready(
    max_model_len=4_000_000, vocab_size=400, kv_tokens=4_000_000, block_size=16, max_num_seqs=4, ranks=1
)
HUGE = {
    "words": "the quick brown fox " * 500_000,
    "one word": "x" * 10_000_000,
    "messages": [{"role": "user", "content": "x"}] * 294_000,
}


@pytest.fixture
def roomy(start_server):
    return start_server(scheduler={"ready": ROOM})


@pytest.fixture
def encoding(monkeypatch):
    """Texts as workers get them to tokenise, and a gate in front of it."""
    from phalanx.rank.server.text_process import RemoteText

    original = RemoteText.run

    class Encoding:
        begun, running, most = [], 0, 0
        gate = threading.Event()

    def run(self, function, *args):
        if function is text_facts:
            return original(self, function, *args)
        Encoding.begun.append(getattr(args[0], "prompt", ""))
        Encoding.running += 1
        Encoding.most = max(Encoding.most, Encoding.running)
        assert Encoding.gate.wait(20)
        Encoding.running -= 1
        return original(self, function, *args)

    monkeypatch.setattr(RemoteText, "run", run)
    yield Encoding
    Encoding.gate.set()


@pytest.mark.parametrize("kind", [pytest.param("words", marks=pytest.mark.long), "one word", "messages"])
def test_what_cannot_fit_is_refused(fresh_server, kind):
    answer = fresh_server.post("chat/completions", messages=HUGE[kind])
    assert answer.status == 400 and answer.body["error"]["code"] == "context_length_exceeded"
    assert "context is 512 tokens" in answer.body["error"]["message"]


def test_short_prompts_are_not_behind_long_ones(roomy, encoding):
    long = [send(roomy, "completions", prompt="x" * (LARGE + 1), max_tokens=1) for _ in range(3)]
    roomy.wait(lambda: encoding.begun)
    short = send(roomy, "completions", prompt="short", max_tokens=1)
    roomy.wait(lambda: "short" in encoding.begun)
    time.sleep(0.05)  # for a second long one to begin in, which must not
    assert len(encoding.begun) == 2
    encoding.gate.set()
    for sock in (short, *long):
        assert read_all(sock).startswith(b"HTTP/1.1 200")
        sock.close()
    assert len(encoding.begun) == 4 and encoding.most == 2


def test_a_long_prompt_leaves_the_loop_to_others(roomy):
    """Two megabytes are tokenised by the library itself, which lets the loop go on."""
    sock = send(roomy, "completions", prompt="hello world, " * 160_000, max_tokens=1)
    roomy.wait(lambda: roomy.engine._tokenising)
    waits = []
    while roomy.call(lambda: roomy.engine._tokenising):
        began = time.monotonic()
        assert roomy.request("GET", "/health").status == 200
        waits.append(time.monotonic() - began)
    assert read_all(sock).startswith(b"HTTP/1.1 200")
    sock.close()
    assert len(waits) > 10 and sorted(waits)[len(waits) // 2] < 0.05


@pytest.mark.parametrize("size", [5, LARGE + 1])
@pytest.mark.parametrize("path", ["completions", "chat/completions", "embeddings"])
def test_who_has_left_is_not_tokenised(roomy, encoding, size, path):
    first = [send(roomy, "completions", prompt="a" * size, max_tokens=1) for _ in range(1 if size > LARGE else THREADS)]
    roomy.wait(lambda: len(encoding.begun) == len(first))
    field = {"completions": "prompt", "chat/completions": "messages", "embeddings": "input"}[path]
    leaver = send(roomy, path, **{field: "b" * size})
    roomy.wait(lambda: roomy.engine._tokenising == len(first) + 1)
    leaver.close()
    roomy.wait(lambda: roomy.engine._tokenising == len(first))
    encoding.gate.set()
    for sock in first:
        assert read_all(sock).startswith(b"HTTP/1.1 200")
        sock.close()
    assert len(encoding.begun) == len(first) == len(roomy.scheduler.requests)
    roomy.wait(lambda: not roomy.link.open_sequences)


def test_memory_goes_back(roomy):
    process = psutil.Process()
    roomy.post("completions", prompt="hello", max_tokens=1)
    before = process.memory_info().rss
    assert roomy.post("completions", prompt="hello world, " * 80_000, max_tokens=1).status == 200
    deadline = time.monotonic() + 10
    while process.memory_info().rss > before + 40e6 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert process.memory_info().rss <= before + 40e6


@pytest.mark.parametrize("body", [{"messages": "the quick brown fox " * 100_000}, {"messages": 5}])
def test_nothing_keeps_a_refused_request(fresh_server, body):
    """Not even until the next garbage collection, which may be minutes away."""

    def held():
        return [one for one in gc.get_objects() if type(one).__name__ in ("Endpoint", "ChatRequest", "ApiError")]

    def left():
        return {id(one) for one in held()} - before.keys()

    fresh_server.post("chat/completions", messages="hi")
    gc.collect()
    before = {id(one): one for one in held()}  # a test that failed may hold its server's
    gc.disable()
    try:
        assert fresh_server.post("chat/completions", **body).status == 400
        fresh_server.wait(lambda: not left(), 2)
    finally:
        gc.enable()


def test_large_bodies_in_hand_are_bounded(fresh_server, monkeypatch):
    monkeypatch.setattr(fresh_server.state.coming, "quota", 3 << 20)
    data = json.dumps({"messages": "word " * 400_000}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    half = socket.create_connection(("127.0.0.1", fresh_server.port))
    half.sendall(head + data[:-10])
    fresh_server.wait(lambda: fresh_server.state.coming.held(0) == len(data) - 10)
    answer = fresh_server.request("POST", "/v1/chat/completions", data)
    assert answer.status == 429 and answer.headers["Retry-After"] == "1"
    assert fresh_server.post("chat/completions", messages="hi").status == 200
    half.close()
    fresh_server.wait(lambda: not fresh_server.state.coming.held(0))
    with socket.create_connection(("127.0.0.1", fresh_server.port)) as leaver:
        leaver.sendall(head + data[:-10])  # and leaves before all of it is taken, at its pace
    time.sleep(0.5)  # the body would be taken in that time
    assert not fresh_server.state.coming.held(0)
    assert fresh_server.request("POST", "/v1/chat/completions", data).status == 400
    fresh_server.wait(lambda: not fresh_server.state.coming.held(0))


def test_refused_bodies_are_not_paced(fresh_server, monkeypatch):
    """Neither one that says its length, nor one beside others that have all the room."""
    monkeypatch.setattr(handler, "LARGE_RATE", 1 << 17)  # the bodies would take 24 s and 12 s
    monkeypatch.setattr(handler, "MAX_BODY", 2 << 20)
    data = b"x" * (3 << 20)
    began = time.monotonic()
    assert fresh_server.request("POST", "/v1/completions", data).status == 413
    fresh_server.state.coming.force(0, 63 << 20)
    assert fresh_server.request("POST", "/v1/completions", data[: 3 << 19]).status == 429
    fresh_server.state.coming.give(0, 63 << 20)
    assert time.monotonic() - began < 12 and fresh_server.state.read_until == 0


@pytest.mark.parametrize("path, field", [("completions", "prompt"), ("embeddings", "input")])
def test_a_large_body_makes_room_when_it_is_tokenised(roomy, path, field):
    """It does not wait for the answer."""
    scheduler = roomy.scheduler
    scheduler.hold = True
    with send(roomy, path, **{field: "a " * 600_000}) as sock:
        roomy.wait(lambda: scheduler.requests, 20)
        assert roomy.state.coming.held(0) == 0
        scheduler.hold = False
        assert read_all(sock).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "path",
    ["completions", *(pytest.param(path, marks=pytest.mark.long) for path in ("chat/completions", "embeddings"))],
)
def test_many_values_are_not_decoded(fresh_server, monkeypatch, path):
    monkeypatch.setattr(handler, "decode", None)
    body = b'{"prompt":[' + b"[1]," * 2_500_000 + b"[1]]}"
    answer = fresh_server.request("POST", f"/v1/{path}", body)
    assert answer.status == 400 and answer.body["error"]["code"] == "context_length_exceeded"
    assert "lists and objects" in answer.body["error"]["message"]


@pytest.mark.parametrize("size", [100, 2 << 20])
@pytest.mark.parametrize("coding", ["identity", "gzip"])
def test_threads_for_bodies_read_large_ones(fresh_server, monkeypatch, size, coding):
    """And the event loop small ones, as they take less than going to a thread."""
    found = []

    def noted(original):
        def called(*args):
            found.append(threading.current_thread().name.partition("_")[0])
            return original(*args)

        return called

    monkeypatch.setattr(handler, "decode", noted(handler.decode))
    monkeypatch.setattr(handler.Inflater, "finish", noted(handler.Inflater.finish))
    body = json.dumps({"prompt": "x", "max_tokens": 1, "user": random.randbytes(size // 2).hex()}).encode()
    body = gzip.compress(body) if coding == "gzip" else body
    answer = fresh_server.request("POST", "/v1/completions", body, {"Content-Encoding": coding})
    assert answer.status == 200, answer.body
    if size > handler.LARGE_BODY:
        assert found == ["bodies"] * (2 if coding == "gzip" else 1)
    else:
        assert len(found) == 1 and found != ["bodies"]


def test_values_are_counted_as_they_come(fresh_server, monkeypatch):
    """Not at the body's end, where all of it would hold up the event loop at once."""
    sizes = []
    feed = handler.BodyValues.feed

    def noted(self, part):
        sizes.append(len(part))
        feed(self, part)

    monkeypatch.setattr(handler.BodyValues, "feed", noted)
    fresh_server.request("POST", "/v1/completions", json.dumps({"prompt": "x" * (3 << 20)}))
    assert sum(sizes) > 3 << 20 and max(sizes) <= 256 << 10


def test_a_body_of_many_values_is_dropped_at_once(fresh_server):
    """Its sender still gets the answer, and what comes after that is not kept."""
    body = b'{"prompt":[' + b"[1]," * 3_000_000
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (len(body) + 3)
    with socket.create_connection(("127.0.0.1", fresh_server.port), timeout=20) as sock:
        sock.sendall(head + body)
        (one,) = fresh_server.state.active
        fresh_server.wait(lambda: one._size == len(body))
        assert not one._body and fresh_server.state.coming.held(0) == 0
        sock.sendall(b"1]}")
        assert sock.recv(12) == b"HTTP/1.1 400"
