"""Memory that requests hold while they are answered: bodies, log-probabilities, tools' results are bounded per key."""

import contextlib
import json
import socket

import pytest
from phalanx.rank.server.http import state

pytestmark = pytest.mark.timeout(60)


def as_key(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(state, "LIVE_BYTES", 2 << 20)
    monkeypatch.setattr(state, "LIVE_FLOOR", 1 << 18)


def opened(server, key, body):
    """A request that is sent and whose answer is not read."""
    sock = socket.create_connection(("127.0.0.1", server.port))
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
    sock.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return sock


@pytest.mark.parametrize("stream", [False, True])
def test_bodies_of_open_requests_are_bounded_for_each_key(start_server, small, stream):
    server = start_server(api_keys=["a", "b"], scheduler={"hold": True})
    body = {"messages": "hi", "user": "x" * 300_000, "stream": stream}
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(contextlib.closing(opened(server, "a", body)))
        server.wait(lambda: server.link.open_sequences == 3)
        refused = server.request("POST", "/v1/chat/completions", body, as_key("a"))
        assert (refused.status, refused.body["error"]["code"]) == (429, "busy") and refused.headers["Retry-After"]
        stack.enter_context(contextlib.closing(opened(server, "b", body)))
        server.wait(lambda: server.link.open_sequences == 4)
    server.wait(lambda: not server.state.active)
    assert [server.state.live.held(key) for key in (0, 1)] == [0, 0]
    server.scheduler.hold = False
    assert server.request("POST", "/v1/chat/completions", {**body, "stream": False}, as_key("a")).status == 200


def test_a_token_of_an_open_request_takes_four_bytes(start_server):
    server = start_server(scheduler={"hold": True})
    with contextlib.closing(opened(server, "", {"messages": "hi " * 100, "return_token_ids": True})):
        # The request is on its way to the scheduler before its handler has a session: others may be waited for between.
        server.wait(lambda: [handler for handler in server.state.active if handler.session])
        (handler,) = server.state.active
        tokens = handler.session.prompts[0].tokens
        assert len(tokens) > 100 and memoryview(tokens).nbytes == 4 * len(tokens)
    server.scheduler.hold = False
    answer = server.post("chat/completions", messages="hi " * 100, return_token_ids=True)
    assert answer.body["choices"][0]["prompt_token_ids"] == list(tokens)


def test_a_large_body_that_comes_slowly_keeps_no_other_key_s_out(start_server):
    server = start_server(api_keys=["a", "b"])
    server.state.coming.quota, server.state.coming.total = 3 << 20, 6 << 20
    data = json.dumps({"messages": "hi", "user": "x" * (2 << 20)}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer a\r\n"
    with contextlib.closing(socket.create_connection(("127.0.0.1", server.port))) as half:
        half.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data[:-10])
        server.wait(lambda: server.state.coming.held(0) == len(data) - 10, 20)
        assert server.request("POST", "/v1/chat/completions", data, as_key("a")).status == 429
        assert server.request("POST", "/v1/chat/completions", data, as_key("b")).status == 200
    server.wait(lambda: server.state.coming.held(0) == 0)


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_log_probabilities_are_bounded(start_server, small, path):
    server = start_server(scheduler={"per_delta": 8})
    chat = {"messages": "hi", "logprobs": True, "top_logprobs": 2}
    body = {"ignore_eos": True, **(chat if path.startswith("chat") else {"prompt": "hi", "logprobs": 2})}
    assert server.post(path, **body, max_tokens=100).status == 200
    answer = server.post(path, **body, max_tokens=400, n=20)
    assert (answer.status, answer.body["error"]["code"]) == (429, "busy")
    server.wait(lambda: server.link.open_sequences == 0)
    assert server.post(path, **body, max_tokens=400, n=20, stream=True).status == 200  # is not held
    server.wait(lambda: server.state.live.held(0) == 0)
