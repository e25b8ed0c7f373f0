"""Connections that end, readers that are slow, leads that come and go; models, health, metrics."""

import contextlib
import gzip
import json
import socket
import threading
import time

import pytest
from phalanx.rank import protocol
from phalanx.rank.server import embeddings, generation

from ..conftest import Front, parse_events

pytestmark = pytest.mark.timeout(30)


def send(front, path, receive_buffer=None, **body):
    """A request on a bare socket, its answer unread."""
    sock = socket.socket()
    if receive_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(20)
    sock.connect(("127.0.0.1", front.port))
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
def test_client_that_goes_away_frees_its_sequences(front, stream, hold):
    front.lead.hold = hold
    front.lead.pause = 0.02
    sock = send(front, "chat/completions", messages="hi", n=2, stream=stream, ignore_eos=True)
    front.wait(lambda: len(front.lead.requests) == 2)
    if stream and not hold:
        assert sock.recv(100)
    assert front.lead.aborted == []
    sock.close()
    front.wait(lambda: sorted(front.lead.aborted) == sorted(request.id for request in front.lead.requests))
    front.lead.hold = False
    assert front.link.open_sequences == 0
    front.wait(lambda: not front.state.active)


def errors(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(
    ("path", "body"),
    [("messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}), ("responses", {"input": "hi"})],
)
def test_client_that_leaves_before_a_whole_answer(make_front, caplog, path, body):
    front = make_front(response_store=4, lead={"hold": True})
    sock = send(front, path, **body)
    front.wait(lambda: front.lead.requests)
    sock.close()
    front.wait(lambda: front.link.open_sequences == 0 and not front.state.active)
    assert front.request("GET", "/health").status == 200  # comes after the request that was left
    assert errors(caplog) == [] and not front.state.responses._kept


def test_client_that_leaves_a_followed_response_as_an_event_comes(make_front, caplog):
    front = make_front(response_store=4, lead={"hold": True})
    sock = send(front, "responses", input="hi", background=True, stream=True)
    assert b"HTTP/1.1 200" in sock.recv(30)
    (kept,) = front.state.responses._kept.values()
    (handler,) = front.state.active

    def leave():  # the event is written before the handler hears that the connection is closed
        kept.add([b"event"])
        handler._socket.close()

    front.call(leave)
    front.wait(lambda: not front.state.active)
    assert front.request("GET", "/health").status == 200
    assert errors(caplog) == []
    sock.close()


def test_client_that_leaves_while_its_body_is_inflated(front, monkeypatch):
    begun, left = threading.Event(), threading.Event()

    def slow(body):
        begun.set()
        assert left.wait(20)
        return gzip.decompress(body)

    monkeypatch.setattr("phalanx.rank.server.http.handler._inflate", slow)
    body = gzip.compress(json.dumps({"messages": "hi"}).encode())
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    with contextlib.closing(socket.create_connection(("127.0.0.1", front.port))) as sock:
        sock.sendall(head.encode() + b"Content-Encoding: gzip\r\n\r\n" + body)
        assert begun.wait(20)
    front.wait(lambda: not front.state.active)
    left.set()
    front.post("chat/completions", messages="hello")
    assert len(front.lead.requests) == 1


def test_finished_sequences_are_not_aborted(front):
    front.post("chat/completions", messages="hi")
    front.events("chat/completions", messages="hi")
    assert front.lead.aborted == []


def test_slow_reader_coalesces_and_stalls_nobody(make_front):
    front = make_front(
        lead={
            "per_delta": 50,
            "ready": protocol.Ready(
                max_model_len=200_000, vocab_size=400, kv_tokens=200_000, block_size=16, max_num_seqs=4, ranks=1
            ),
        }
    )
    front.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # inherited by accepted connections
    slow = send(front, "completions", receive_buffer=4096, prompt="x", stream=True, ignore_eos=True, max_tokens=100_000)
    front.wait(lambda: front.link.open_sequences == 0 and front.lead.requests)  # all of it generated, little of it read
    assert front.post("completions", prompt="x").body["choices"][0]["text"] == "hello world"
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
    tokens = (front.lead.encode("hello world") * 100_000)[:100_000]
    assert text == "".join(front.sessions.text.tokenizer.piece(token).decode() for token in tokens)
    assert len(events) < 1000  # of 2000 deltas


def test_lead_dies_in_the_middle(front):
    front.lead.pause = 0.02
    sock = send(front, "chat/completions", messages="hi", stream=True, ignore_eos=True)
    whole = send(front, "chat/completions", messages="hi", ignore_eos=True)
    front.wait(lambda: len(front.lead.requests) == 2)
    assert b"HTTP/1.1 200" in sock.recv(30)
    front.call(front.lead.close)
    answer = read_all(sock)
    sock.close()
    assert b'data: {"error":{"message":"the job ended","type":"service_unavailable_error"' in answer
    assert b"[DONE]" not in answer
    answer = read_all(whole)
    whole.close()
    assert answer.startswith(b"HTTP/1.1 503") and b"the job ended" in answer
    later = front.post("chat/completions", messages="hi")
    assert later.status == 503 and later.body["error"]["message"] == "the job ended"
    assert front.request("GET", "/health").body == {"status": "failed"}


def test_fatal_tells_why(front):
    front.lead.hold = True
    sock = send(front, "chat/completions", messages="hi")
    front.wait(lambda: front.lead.requests)
    front.call(front.lead.send, protocol.Fatal("rank 1 on host b is stuck", 71))
    assert b"the job ended: rank 1 on host b is stuck" in read_all(sock)
    sock.close()
    front.call(front.lead.close)
    front.wait(lambda: front.link.state == "failed")
    assert front.request("GET", "/health").body == {"status": "failed", "message": "rank 1 on host b is stuck"}


def test_restart(make_front):
    front = make_front(restarts_expected=True)
    assert front.post("completions", prompt="x").status == 200
    front.call(front.lead.close)
    front.wait(lambda: front.link.state == "restarting")
    answer = front.post("completions", prompt="x")
    assert answer.status == 503 and answer.headers["Retry-After"] == "5"
    assert answer.body["error"]["message"] == "the job ended; it is being restarted, try again in a few seconds"
    assert front.request("GET", "/health").body == {"status": "restarting"}
    front.call(front.lead.connect(ready=False))
    front.wait(lambda: front.link.state == "loading")
    front.call(front.lead.send, front.lead.ready)
    front.wait(lambda: front.link.state == "ready")
    assert front.post("completions", prompt="x").body["choices"][0]["text"] == "hello world"


def test_a_new_lead_replaces_the_old(make_front):
    front = make_front(restarts_expected=True)
    front.lead.hold = True
    sock = send(front, "completions", prompt="x")
    front.wait(lambda: front.lead.requests)
    old = front.lead.writer
    front.call(front.lead.connect)
    assert read_all(sock).startswith(b"HTTP/1.1 503")
    sock.close()
    front.lead.hold = False
    front.wait(lambda: front.link.state == "ready")
    assert front.post("completions", prompt="x").status == 200
    front.call(old.close)


def test_loading(make_front):
    front = make_front(connect=False)
    answer = front.post("completions", prompt="x")
    assert answer.status == 503 and answer.headers["Retry-After"] == "5"
    assert answer.body["error"] == {
        "message": "the model is still loading (starting); try again in a few seconds",
        "type": "service_unavailable_error",
        "param": None,
        "code": "loading",
    }
    front.call(front.lead.connect(ready=False))
    front.call(front.lead.send, protocol.Progress("weights", 3, 10))
    front.wait(lambda: front.link.progress.done == 3)
    assert "still loading (weights, 3 of 10)" in front.post("completions", prompt="x").body["error"]["message"]
    answer = front.request("GET", "/health")
    assert (answer.status, answer.body) == (
        503,
        {"status": "loading", "progress": {"phase": "weights", "done": 3, "total": 10}},
    )
    assert front.request("GET", "/v1/models").body["data"][0]["max_model_len"] is None


def test_drain(front):
    front.lead.hold = True
    sock = send(front, "chat/completions", messages="hi", stream=True)
    front.wait(lambda: front.lead.requests)
    front.call(front.link.drain)
    answer = front.post("chat/completions", messages="hi")
    assert answer.status == 503 and answer.headers["Retry-After"]
    assert answer.body["error"]["message"] == "the server is shutting down and takes no new requests"
    assert front.request("GET", "/health").body == {"status": "draining"}
    front.lead.hold = False
    assert read_all(sock).rstrip().endswith(b"data: [DONE]\n\n\r\n0")  # it was finished
    sock.close()
    front.wait(lambda: front.lead.drained)


@pytest.mark.parametrize(
    ("path", "field", "module", "function"),
    [
        ("chat/completions", "messages", generation, "chat_prompt"),
        ("embeddings", "input", embeddings, "embedding_inputs"),
    ],
)
def test_the_end_while_texts_are_tokenised_is_503(make_front, monkeypatch, caplog, path, field, module, function):
    front, held, whole = make_front(), threading.Event(), getattr(module, function)
    monkeypatch.setattr(module, function, lambda *args: (held.wait(20), whole(*args))[1])
    socks = [send(front, path, **{field: "hi"}) for _ in range(4)]  # two are read at once
    try:
        front.wait(lambda: len(front.state.active) == 4)
        front.call(front.link.close)
        front.call(front.sessions.close)
    finally:
        held.set()
    for sock in socks:
        answer = read_all(sock)
        assert answer.startswith(b"HTTP/1.1 503 ") and b'"service_unavailable_error"' in answer
        sock.close()
    assert not caplog.text


def test_queue_full(make_front):
    front = make_front(queue_size=2)  # and max_num_seqs 4
    front.lead.hold = True
    socks = [send(front, "completions", prompt="x", n=3) for _ in range(2)]
    front.wait(lambda: len(front.lead.requests) == 6)
    answer = front.post("completions", prompt="x")
    assert answer.status == 429 and answer.headers["Retry-After"] == "1"
    assert answer.body["error"]["message"] == (
        "the queue is full: 6 sequences are open and 1 more would exceed 6; try again later"
    )
    front.lead.hold = False
    assert all(read_all(sock).startswith(b"HTTP/1.1 200") for sock in socks)
    assert front.post("completions", prompt="x", n=20).status == 200  # alone, it may be larger than the queue
    for sock in socks:
        sock.close()


def test_keep_alive(make_front):
    front = make_front(keep_alive_interval=0.05)
    front.lead.hold = True
    sock = send(front, "chat/completions", messages="hi", stream=True)
    answer = b""
    while answer.count(b": keep-alive\n\n") < 2:
        data = sock.recv(1 << 16)
        assert data, "the connection was closed"
        answer += data
    front.lead.hold = False
    answer += read_all(sock)
    sock.close()
    assert b"text/event-stream" in answer and b"[DONE]" in answer


def test_error_after_the_first_event(make_front):
    front = make_front(keep_alive_interval=0.05)
    front.lead.hold, front.lead.error = True, (500, "the engine failed")
    sock = send(front, "chat/completions", messages="hi", stream=True)
    sock.recv(1 << 16)
    time.sleep(0.1)  # two keep-alives' time: the stream has begun for certain
    front.lead.hold = False
    answer = read_all(sock)
    sock.close()
    assert b'data: {"error":{"message":"the engine failed","type":"server_error","param":null,"code":null}}' in answer
    assert b"[DONE]" not in answer


def test_a_client_that_never_finishes_its_request_harms_nobody(front):
    with contextlib.closing(socket.create_connection(("127.0.0.1", front.port))) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Le")
        assert front.post("completions", prompt="x").status == 200


def test_many_at_once(front):
    front.lead.pause = 0.001
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(front.events("completions", prompt="x")[-1])) for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["[DONE]"] * 20


def test_models(front, client):
    models = list(client.models.list())
    assert [(model.id, model.object, model.owned_by) for model in models] == [
        ("tiny", "model", "phalanx"),
        ("other", "model", "phalanx"),
    ]
    one = front.request("GET", "/v1/models/other").body
    assert (one["root"], one["parent"], one["max_model_len"], one["permission"]) == ("tiny", "tiny", 512, [])
    missing = front.request("GET", "/v1/models/none")
    assert missing.status == 404 and missing.body["error"]["code"] == "model_not_found"
    assert missing.body["error"]["message"] == "the model 'none' does not exist; this server has tiny, other"


def test_metrics(front):
    front.post("completions", prompt="x", max_tokens=4, ignore_eos=True)
    front.post("completions", prompt="")
    front.call(
        front.lead.send, protocol.Deltas([], protocol.Stats(running=3, blocks_total=10, blocks_used=5, preemptions=7))
    )
    front.wait(lambda: front.link.stats.running == 3)
    page = front.request("GET", "/metrics")
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

    front = Front(tmp_path, model_dir, tokenizer, True, {}, sock=listener)
    try:
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as sock:
            sock.connect(path)
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: any.example\r\nConnection: close\r\n\r\n")
            assert read_all(sock).startswith(b"HTTP/1.1 200")
    finally:
        front.stop()


def test_a_fault_of_ours_in_a_stream_is_an_error_event(make_front, monkeypatch, caplog):
    front = make_front(keep_alive_interval=0.05)
    front.lead.hold = True
    sock = send(front, "chat/completions", messages="hi", stream=True)
    sock.recv(1 << 16)
    time.sleep(0.1)  # two keep-alives' time: the stream has begun for certain
    monkeypatch.setattr("phalanx.rank.server.openai_format.ChatRenderer.parts", lambda self, update: 1 / 0)
    front.lead.hold = False
    answer = read_all(sock)
    sock.close()
    assert b'data: {"error":{"message":"an internal error; the server\'s log has the details' in answer
    assert "ZeroDivisionError" in caplog.text
