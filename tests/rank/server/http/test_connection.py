"""Requests that never come whole, and what is no HTTP."""

import contextlib
import gc
import http.client
import json
import socket
import struct
import time

import pytest
from phalanx.rank.server.http import app, handler

from .... import retries

pytestmark = [pytest.mark.timeout(30), retries.CLOCKS]
HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n" + b'{"prompt": "x'


def connect(fresh_server):
    return contextlib.closing(socket.create_connection(("127.0.0.1", fresh_server.port), timeout=20))


@pytest.mark.parametrize("path", [b"completions", b"chat/completions", b"embeddings"])
@pytest.mark.parametrize("reset", [False, True])
def test_a_client_that_leaves_in_the_middle_of_its_body_is_forgotten(fresh_server, path, reset):
    with connect(fresh_server) as sock:
        sock.sendall(HALF.replace(b"completions", path))
        fresh_server.wait(lambda: [handler._body for handler in fresh_server.state.active])
        (handler,) = fresh_server.state.active
        if reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    fresh_server.wait(lambda: not fresh_server.state.active)
    assert handler._body == []
    assert fresh_server.scheduler.requests == []


GOOD = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
STALLS = {
    "plain": HALF,
    "chunked": HALF.partition(b"Content-Length")[0] + b"Transfer-Encoding: chunked\r\n\r\n100\r\nabc",
    "pipelined": GOOD + HALF,
    "half closed": HALF,
    "slow": HALF,
    "of no endpoint": HALF.replace(b"completions", b"nothing"),
    "of a form": HALF.replace(b"Content-Length", b"Content-Type: multipart/form-data; boundary=b\r\nContent-Length"),
}


@pytest.mark.parametrize("kind", STALLS)
def test_a_client_that_stalls_in_the_middle_of_its_body_is_hung_up_on(start_server, monkeypatch, caplog, kind):
    """The log has one line and no traceback."""
    monkeypatch.setattr(app, "BODY_TIMEOUT", 0.4)
    monkeypatch.setattr(handler, "DISCARD_TIMEOUT", 0.4)
    gc.collect()  # what earlier tests have left
    caplog.clear()
    caplog.set_level("INFO")
    server = start_server()
    with connect(server) as sock:
        sock.sendall(STALLS[kind])
        if kind == "half closed":
            sock.shutdown(socket.SHUT_WR)
        if kind == "slow":
            sock.sendall(b" ")
            time.sleep(0.2)  # half of the time that all of it may take
            sock.sendall(b" ")
        came = b""
        with contextlib.suppress(ConnectionResetError):
            while data := sock.recv(1 << 16):
                came += data
        assert (b"200 OK" in came) == (kind == "pipelined")
    server.wait(lambda: not server.state.active)
    gc.collect()  # what nobody has awaited is logged then
    assert all(record.exc_info is None and "Timeout" in record.getMessage() for record in caplog.records)
    assert len(caplog.records) == (kind != "half closed")  # who has closed is not waited for


def answers(fresh_server, data):
    """The answer until the server hangs up: status, headers, body."""
    with connect(fresh_server) as sock:
        sock.sendall(data)
        answer = b""
        while part := sock.recv(1 << 20):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    assert int(headers["content-length"]) == len(body)
    assert headers["connection"] == "close" and headers["content-type"] == "application/json"
    return int(status.split()[1]), json.loads(body)["error"]


POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    ("data", "status", "word"),
    [
        (POST + b"Content-Length: abc\r\n\r\n{}", 400, "abc"),
        (POST + b"Content-Length: -1\r\n\r\n", 400, "-1"),
        (POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}", 400, "Content-Length"),
        (POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}", 400, "Transfer-Encoding"),
        (POST + b"Transfer-Encoding: gzip\r\n\r\n", 400, "gzip"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n{}\r\n0\r\n\r\n", 400, "chunk"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}xx0\r\n\r\n", 400, "chunk"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"0" * 100, 400, "chunk"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"9" * 60 + b"\r\n", 413, "large"),
        (POST + b"no colon\r\n\r\n", 400, "colon"),
        (POST + b"a b: c\r\n\r\n", 400, "header"),
        (b"GET /health HTTP/1.1\r\n\r\n", 400, "Host"),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, "host"),
        (b"hello\r\n\r\n", 400, "request line"),
        (b"GET /health HTTP/2.0\r\n\r\n", 400, "version"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 70_000 + b"\r\n\r\n", 431, "64 KiB"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 300_000 + b"\r\n\r\n", 431, "64 KiB"),
    ],
    ids=lambda value: value[-40:] if isinstance(value, bytes) else None,
)
def test_what_is_no_http_is_told_so(fresh_server, data, status, word):
    got, error = answers(fresh_server, data)
    assert got == status
    assert error["type"] == "invalid_request_error" and word in error["message"]
    fresh_server.wait(lambda: not fresh_server.state.active)
    assert fresh_server.post("completions", prompt="x").status == 200


def test_after_a_good_request(fresh_server):
    """On a connection that was kept open."""
    with connect(fresh_server) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nnonsense\r\n\r\n")
        answer = b""
        while part := sock.recv(1 << 20):
            answer += part
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.count(b"HTTP/1.1 400 ") == 1


def test_a_length_of_thousands_of_digits(fresh_server):
    with socket.create_connection(("127.0.0.1", fresh_server.port)) as sock:
        sock.sendall(POST + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n{}")
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 413")


FORM = {"Content-Type": "multipart/form-data; boundary=x"}


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/completions", {"Authorization": "Bearer wrong"}, 401),
        ("/v1/files", {"Authorization": "Bearer wrong", **FORM}, 401),
        ("/v1/files", {"Authorization": "Bearer right", **FORM}, 404),  # there is no --file-store
        ("/v1/completions", {"Authorization": "Bearer right", "Origin": "https://other.example"}, 403),
    ],
)
def test_a_refusal_reaches_a_client_that_still_sends(start_server, path, headers, status):
    server = start_server(api_keys=["right"])
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    with contextlib.closing(connection):
        connection.request("POST", path, b" " * (40 << 20), headers)
        answer = connection.getresponse()
        assert answer.status == status and json.loads(answer.read())["error"]["message"]
        assert server.state.coming.held(0) == 0
        connection.request("GET", "/v1/models", headers={"Authorization": "Bearer right"})  # it goes on
        assert connection.getresponse().status == 200


def test_a_refusal_comes_before_a_body_that_waits_for_leave(start_server):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000\r\nExpect: 100-continue\r\n\r\n"
    with connect(start_server(api_keys=["right"])) as sock:
        sock.sendall(head)
        answer = sock.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 401 ") and b"\r\nConnection: close\r\n" in answer
        assert sock.recv(1 << 16) == b""


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://localhost:2000/health", "localhost", 200),
        ("HTTP://127.0.0.1/v1/models?x=1", "other", 200),
        ("https://localhost/v1/models/tiny", "localhost", 200),
        ("http://localhost", "localhost", 404),  # there is no page at /
        ("http://other.example/v1/models", "localhost", 403),  # what the target names counts
        ("http:///v1/models", "localhost", 404),
        ("ftp://localhost/v1/models", "localhost", 404),
    ],
)
def test_a_target_may_name_the_server(fresh_server, target, host, status):
    with connect(fresh_server) as sock:
        sock.sendall(f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        answer = sock.makefile("rb").read()
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer


@pytest.mark.parametrize("path", ["/nothing", "/v1/messages/nothing"])
def test_nothing_is_kept_of_a_body_for_nobody(fresh_server, monkeypatch, path):
    """Neither is it decoded, nor is more read than of others that are refused."""
    kept = []
    original = handler.NotFound.write_error

    def write_error(self, status, **more):
        kept.append((len(self.request.body), self._body))
        original(self, status, **more)

    monkeypatch.setattr(handler.NotFound, "write_error", write_error)
    connection = http.client.HTTPConnection("127.0.0.1", fresh_server.port, timeout=20)
    with contextlib.closing(connection):
        for method in ("POST", "PUT"):
            connection.request(method, path, b" " * (3 << 20))
            answer = connection.getresponse()
            assert answer.status == 404 and "error" in json.loads(answer.read())
    assert kept == [(0, [])] * 2
    with connect(fresh_server) as sock:
        sock.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {200 << 20}\r\n\r\n".encode())
        assert sock.makefile("rb").read().startswith(b"HTTP/1.1 404 ")
    for method in ("GET", "OPTIONS", "DELETE"):
        assert fresh_server.request(method, path).status == 404
