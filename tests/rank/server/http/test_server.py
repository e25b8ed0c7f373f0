"""Connections that end, readers that are slow, schedulers that come and go; models, health, metrics."""

import contextlib
import gzip
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from phalanx.rank import protocol

from ..conftest import LiveServer, parse_events

pytestmark = pytest.mark.timeout(30)


def send(fresh_server, path, receive_buffer=None, **body):
    """A request on a bare socket, its answer unread."""
    sock = socket.socket()
    if receive_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(20)
    sock.connect(("127.0.0.1", fresh_server.port))
    data = json.dumps(body).encode()
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    return sock


def read_all(sock):
    data = b""
    while part := sock.recv(1 << 20):
        data += part
    return data


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold", [False, True])
def test_client_that_goes_away_frees_its_sequences(fresh_server, stream, hold):
    fresh_server.scheduler.hold = hold
    fresh_server.scheduler.pause = 0.02
    sock = send(fresh_server, "chat/completions", messages="hi", n=2, stream=stream, ignore_eos=True)
    fresh_server.wait(lambda: len(fresh_server.scheduler.requests) == 2)
    if stream and not hold:
        assert sock.recv(100)
    assert fresh_server.scheduler.aborted == []
    sock.close()
    scheduler = fresh_server.scheduler
    fresh_server.wait(lambda: sorted(scheduler.aborted) == sorted(request.id for request in scheduler.requests))
    scheduler.hold = False
    assert fresh_server.link.open_sequences == 0
    fresh_server.wait(lambda: not fresh_server.state.active)


def errors(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(
    ("path", "body"),
    [("messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}), ("responses", {"input": "hi"})],
)
def test_client_that_leaves_before_a_whole_answer(start_server, caplog, path, body):
    server = start_server(response_store=4, scheduler={"hold": True})
    sock = send(server, path, **body)
    server.wait(lambda: server.scheduler.requests)
    sock.close()
    server.wait(lambda: server.link.open_sequences == 0 and not server.state.active)
    assert server.request("GET", "/health").status == 200  # comes after the request that was left
    assert errors(caplog) == [] and not server.state.responses._kept


def test_client_that_leaves_a_followed_response_as_an_event_comes(start_server, caplog):
    server = start_server(response_store=4, scheduler={"hold": True})
    sock = send(server, "responses", input="hi", background=True, stream=True)
    assert b"HTTP/1.1 200" in sock.recv(30)
    (kept,) = server.state.responses._kept
    (handler,) = server.state.active

    def leave():  # the event is written before the handler hears that the connection is closed
        kept.add([b"event"])
        handler._socket.close()

    server.call(leave)
    server.wait(lambda: not server.state.active)
    assert server.request("GET", "/health").status == 200
    assert errors(caplog) == []
    sock.close()


def test_client_that_leaves_while_its_body_is_inflated(fresh_server, monkeypatch):
    begun, left = threading.Event(), threading.Event()

    def slow(*_):
        begun.set()
        assert left.wait(20)

    monkeypatch.setattr("phalanx.rank.server.http.handler.INLINE", 1)
    monkeypatch.setattr("phalanx.rank.server.http.handler.Inflater.finish", slow)
    body = gzip.compress(json.dumps({"messages": "hi"}).encode())
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    with contextlib.closing(socket.create_connection(("127.0.0.1", fresh_server.port))) as sock:
        sock.sendall(head.encode() + b"Content-Encoding: gzip\r\n\r\n" + body)
        assert begun.wait(20)
    fresh_server.wait(lambda: not fresh_server.state.active)
    left.set()
    fresh_server.post("chat/completions", messages="hello")
    assert len(fresh_server.scheduler.requests) == 1


def test_finished_sequences_are_not_aborted(fresh_server):
    fresh_server.post("chat/completions", messages="hi")
    fresh_server.events("chat/completions", messages="hi")
    assert fresh_server.scheduler.aborted == []


def test_slow_reader_coalesces_and_stalls_nobody(start_server):
    server = start_server(
        scheduler={
            "per_delta": 50,
            "ready": protocol.Ready(
                max_model_len=200_000, vocab_size=400, kv_tokens=200_000, block_size=16, max_num_seqs=4, ranks=1
            ),
        }
    )
    server.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # inherited by accepted connections
    asked = dict(prompt="x", stream=True, ignore_eos=True, max_tokens=100_000)
    slow = send(server, "completions", receive_buffer=4096, **asked)
    # All of it generated, little of it read.
    server.wait(lambda: server.link.open_sequences == 0 and server.scheduler.requests)
    assert server.post("completions", prompt="x").body["choices"][0]["text"] == "hello world"
    answer = read_all(slow)
    slow.close()
    body = answer.partition(b"\r\n\r\n")[2]
    chunks = []
    while body:
        size, _, body = body.partition(b"\r\n")
        chunks.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
    events = parse_events(b"".join(chunks))
    text = "".join(event["choices"][0]["text"] for event in events[:-1])
    tokens = (server.scheduler.encode("hello world") * 100_000)[:100_000]
    assert text == "".join(server.engine.text.tokenizer.piece(token).decode() for token in tokens)
    assert len(events) < 1000  # of 2000 deltas


def test_the_job_ends_in_the_middle(fresh_server):
    fresh_server.scheduler.pause = 0.02
    sock = send(fresh_server, "chat/completions", messages="hi", stream=True, ignore_eos=True)
    whole = send(fresh_server, "chat/completions", messages="hi", ignore_eos=True)
    fresh_server.wait(lambda: len(fresh_server.scheduler.requests) == 2)
    assert b"HTTP/1.1 200" in sock.recv(30)
    fresh_server.call(fresh_server.scheduler.close)
    answer = read_all(sock)
    sock.close()
    error = b'data: {"error":{"message":"the job ended; send the request again","type":"service_unavailable_error"'
    assert error in answer
    assert b"[DONE]" not in answer
    answer = read_all(whole)
    whole.close()
    assert answer.startswith(b"HTTP/1.1 503") and b"the job ended" in answer
    later = fresh_server.post("chat/completions", messages="hi")
    assert later.status == 503 and later.body["error"]["message"] == "the job ended"
    assert fresh_server.request("GET", "/health").body == {"status": "failed"}


def test_fatal_tells_why(fresh_server):
    fresh_server.scheduler.hold = True
    sock = send(fresh_server, "chat/completions", messages="hi")
    fresh_server.wait(lambda: fresh_server.scheduler.requests)
    fresh_server.call(fresh_server.scheduler.send, protocol.Fatal("rank 1 is stuck", 71))
    answer = read_all(sock)
    assert b"job ended" in answer
    assert b"rank 1 is stuck" in answer
    sock.close()
    fresh_server.call(fresh_server.scheduler.close)
    fresh_server.wait(lambda: fresh_server.link.state == "failed")
    assert fresh_server.request("GET", "/health").body == {"status": "failed", "message": "rank 1 is stuck"}


def test_restart(start_server):
    server = start_server(restarts_expected=True)
    assert server.post("completions", prompt="x").status == 200
    server.call(server.scheduler.close)
    server.wait(lambda: server.link.state == "restarting")
    answer = server.post("completions", prompt="x")
    assert answer.status == 503 and answer.headers["Retry-After"] == "5"
    assert "being restarted, try again" in answer.body["error"]["message"]
    assert server.request("GET", "/health").body == {"status": "restarting"}
    server.call(server.scheduler.connect(ready=False))
    server.wait(lambda: server.link.state == "loading")
    server.call(server.scheduler.send, server.scheduler.ready)
    server.wait(lambda: server.link.state == "ready")
    assert server.post("completions", prompt="x").body["choices"][0]["text"] == "hello world"


def test_a_new_scheduler_replaces_the_old(start_server):
    server = start_server(restarts_expected=True)
    server.scheduler.hold = True
    sock = send(server, "completions", prompt="x")
    server.wait(lambda: server.scheduler.requests)
    old = server.scheduler.writer
    server.call(server.scheduler.connect)
    assert read_all(sock).startswith(b"HTTP/1.1 503")
    sock.close()
    server.scheduler.hold = False
    server.wait(lambda: server.link.state == "ready")
    assert server.post("completions", prompt="x").status == 200
    server.call(old.close)


def test_loading(start_server):
    server = start_server(connect=False)
    answer = server.post("completions", prompt="x")
    assert answer.status == 503 and answer.headers["Retry-After"] == "5"
    assert answer.body["error"] == {
        "message": answer.body["error"]["message"],
        "type": "service_unavailable_error",
        "param": None,
        "code": "loading",
    }
    server.call(server.scheduler.connect(ready=False))
    server.call(server.scheduler.send, protocol.Progress("weights", 3, 10))
    server.wait(lambda: server.link.progress.done == 3)
    assert "still loading (weights, 3" in server.post("completions", prompt="x").body["error"]["message"]
    answer = server.request("GET", "/health")
    assert (answer.status, answer.body) == (
        503,
        {"status": "loading", "progress": {"phase": "weights", "done": 3, "total": 10}},
    )
    assert server.request("GET", "/v1/models").body["data"][0]["max_model_len"] is None


def test_drain(fresh_server):
    fresh_server.scheduler.hold = True
    sock = send(fresh_server, "chat/completions", messages="hi", stream=True)
    fresh_server.wait(lambda: fresh_server.scheduler.requests)
    fresh_server.call(fresh_server.link.drain)
    answer = fresh_server.post("chat/completions", messages="hi")
    assert answer.status == 503 and answer.headers["Retry-After"]
    assert "shutting down" in answer.body["error"]["message"]
    assert fresh_server.request("GET", "/health").body == {"status": "draining"}
    fresh_server.scheduler.hold = False
    assert read_all(sock).rstrip().endswith(b"data: [DONE]\n\n\r\n0")  # it was finished
    sock.close()
    fresh_server.wait(lambda: fresh_server.scheduler.drained)


@pytest.mark.parametrize(("path", "field"), [("chat/completions", "messages"), ("embeddings", "input")])
def test_the_end_while_texts_are_tokenised_is_503(start_server, monkeypatch, caplog, path, field):
    server, held = start_server(), threading.Event()
    whole = server.engine.text.run
    monkeypatch.setattr(server.engine.text, "run", lambda *args: (held.wait(20), whole(*args))[1])
    socks = [send(server, path, **{field: "hi"}) for _ in range(4)]  # two are read at once
    try:
        server.wait(lambda: len(server.state.active) == 4)
        server.call(server.link.close)
        server.call(server.engine.close)
    finally:
        held.set()
    for sock in socks:
        answer = read_all(sock)
        assert answer.startswith(b"HTTP/1.1 503 ") and b'"service_unavailable_error"' in answer
        sock.close()
    assert not caplog.text


def test_queue_full(start_server):
    server = start_server(queue_size=2)  # and max_num_seqs 4
    server.scheduler.hold = True
    socks = [send(server, "completions", prompt="x", n=3) for _ in range(2)]
    server.wait(lambda: len(server.scheduler.requests) == 6)
    answer = server.post("completions", prompt="x")
    assert answer.status == 429 and answer.headers["Retry-After"] == "1"
    assert "full: 6 sequences" in answer.body["error"]["message"]
    server.scheduler.hold = False
    assert all(read_all(sock).startswith(b"HTTP/1.1 200") for sock in socks)
    assert server.post("completions", prompt="x", n=20).status == 200  # alone, it may be larger than the queue
    for sock in socks:
        sock.close()


def test_keep_alive(start_server):
    server = start_server(keep_alive_interval=0.05)
    server.scheduler.hold = True
    sock = send(server, "chat/completions", messages="hi", stream=True)
    answer = b""
    while answer.count(b": keep-alive\n\n") < 2:
        data = sock.recv(1 << 16)
        assert data, "the connection was closed"
        answer += data
    server.scheduler.hold = False
    answer += read_all(sock)
    sock.close()
    assert b"text/event-stream" in answer and b"[DONE]" in answer


def test_error_after_the_first_event(start_server):
    server = start_server(keep_alive_interval=0.05)
    server.scheduler.hold, server.scheduler.error = True, (500, "the engine failed")
    sock = send(server, "chat/completions", messages="hi", stream=True)
    sock.recv(1 << 16)
    time.sleep(0.1)  # two keep-alives' time: the stream has begun for certain
    server.scheduler.hold = False
    answer = read_all(sock)
    sock.close()
    assert b'data: {"error":{"message":"the engine failed","type":"server_error","param":null,"code":null}}' in answer
    assert b"[DONE]" not in answer


def test_a_client_that_never_finishes_its_request_harms_nobody(fresh_server):
    with contextlib.closing(socket.create_connection(("127.0.0.1", fresh_server.port))) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Le")
        assert fresh_server.post("completions", prompt="x").status == 200


def test_many_at_once(fresh_server):
    fresh_server.scheduler.pause = 0.001
    with ThreadPoolExecutor(20) as pool:
        asked = [pool.submit(fresh_server.events, "completions", prompt="x") for _ in range(20)]
        results = [one.result(timeout=20)[-1] for one in asked]
    assert results == ["[DONE]"] * 20


def test_models(fresh_server, client):
    models = list(client.models.list())
    assert [(model.id, model.object, model.owned_by) for model in models] == [
        ("tiny", "model", "phalanx"),
        ("other", "model", "phalanx"),
    ]
    one = fresh_server.request("GET", "/v1/models/other").body
    assert (one["root"], one["parent"], one["max_model_len"], one["permission"]) == ("tiny", "tiny", 512, [])
    missing = fresh_server.request("GET", "/v1/models/none")
    assert missing.status == 404 and missing.body["error"]["code"] == "model_not_found"
    assert "model 'none'" in missing.body["error"]["message"]


def test_metrics(fresh_server):
    fresh_server.post("completions", prompt="x", max_tokens=4, ignore_eos=True)
    fresh_server.post("completions", prompt="")
    stats = protocol.Stats(running=3, blocks_total=10, blocks_used=5, preemptions=7)
    fresh_server.call(fresh_server.scheduler.send, protocol.Deltas([], stats))
    fresh_server.wait(lambda: fresh_server.link.stats.running == 3)
    page = fresh_server.request("GET", "/metrics")
    assert page.headers["Content-Type"].startswith("text/plain")
    lines = page.body.decode().splitlines()
    for line in (
        'phalanx_http_requests_total{method="POST",path="/v1/completions",status="200"} 1.0',
        'phalanx_http_requests_total{method="POST",path="/v1/completions",status="400"} 1.0',
        'phalanx_requests_total{finish_reason="length"} 1.0',
        "phalanx_requests_running 3.0",
        "phalanx_kv_cache_usage_ratio 0.5",
        "phalanx_preemptions_total 7.0",
        "phalanx_ready 1.0",
        "phalanx_time_to_first_token_seconds_count 1.0",
        "phalanx_time_per_output_token_seconds_count 1.0",
        "phalanx_request_output_tokens_sum 4.0",
    ):
        assert line in lines
    assert any(line.startswith("phalanx_build_info{model=") for line in lines)


def test_unix_socket(tmp_path, model_dir, tokenizer):
    path = str(tmp_path / "http")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)

    fresh_server = LiveServer(tmp_path, model_dir, tokenizer, True, {}, sock=listener)
    try:
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as sock:
            sock.connect(path)
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: any.example\r\nConnection: close\r\n\r\n")
            assert read_all(sock).startswith(b"HTTP/1.1 200")
    finally:
        fresh_server.stop()


def test_a_fault_of_ours_in_a_stream_is_an_error_event(start_server, monkeypatch, caplog):
    server = start_server(keep_alive_interval=0.05)
    server.scheduler.hold = True
    sock = send(server, "chat/completions", messages="hi", stream=True)
    sock.recv(1 << 16)
    time.sleep(0.1)  # two keep-alives' time: the stream has begun for certain
    monkeypatch.setattr("phalanx.rank.server.openai_format.ChatRenderer.parts", lambda self, update: 1 / 0)
    server.scheduler.hold = False
    answer = read_all(sock)
    sock.close()
    assert b'data: {"error":{"message":"an internal error; the server\'s log has the details' in answer
    assert "ZeroDivisionError" in caplog.text
