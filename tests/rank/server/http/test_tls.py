"""The server over TLS."""

import asyncio
import contextlib
import http.client
import json
import socket
import ssl

import pytest
from phalanx.launcher.commands.bench.client import Answer, Client, Failure
from phalanx.rank.server import tls
from phalanx.rank.server.http import app, listener
from phalanx.rank.server.http.listener import Descriptors

from ....certificates import make_certificate

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def fresh_server(start_server, files):
    return start_server(tls_cert=files[0], tls_key=files[1])


def connect(fresh_server, files):
    context = tls.client_context(tls.certificate(files[0]))
    return http.client.HTTPSConnection("127.0.0.1", fresh_server.port, context=context, timeout=20)


def test_answers_whole_and_streamed(fresh_server, files):
    with contextlib.closing(connect(fresh_server, files)) as connection:
        for stream in (False, True):  # on one connection
            body = json.dumps({"messages": "hi", "stream": stream, "max_tokens": 5})
            connection.request("POST", "/v1/chat/completions", body)
            answer = connection.getresponse()
            assert answer.status == 200 and answer.read().endswith(b"data: [DONE]\n\n") == stream


def test_phalanx_bench_speaks_it(fresh_server, files):
    client = Client(f"https://127.0.0.1:{fresh_server.port}", "none", 20, tls.certificate(files[0]))
    body = json.dumps({"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}).encode()
    answer = Answer()
    asyncio.run(client.call("POST", "/v1/completions", body, answer))
    assert answer.times
    with pytest.raises(Failure, match="certificate verify failed"):
        asyncio.run(Client(client.root, "none", 20).call("GET", "/v1/models"))


def test_what_is_no_http_is_answered_in_words(fresh_server, files):
    context = tls.client_context(tls.certificate(files[0]))
    with socket.create_connection(("127.0.0.1", fresh_server.port), 20) as plain, context.wrap_socket(plain) as sock:
        sock.sendall(b"what is this\r\n\r\n")
        answer = b""
        with contextlib.suppress(ssl.SSLError):  # it hangs up without a farewell
            while part := sock.recv(1 << 16):
                answer += part
    assert b"400 Bad Request" in answer
    assert b"not valid HTTP" in answer


def test_http_without_tls_and_silence_are_hung_up_on(start_server, files, monkeypatch):
    monkeypatch.setattr(app, "HEADER_TIMEOUT", 0.3)
    server = start_server(tls_cert=files[0], tls_key=files[1])
    for sent in (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b""):
        with socket.create_connection(("127.0.0.1", server.port), 20) as sock:
            sock.sendall(sent)
            with contextlib.suppress(ConnectionResetError):
                assert b"HTTP" not in sock.recv(1 << 16)
    with contextlib.closing(connect(server, files)) as connection:
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01"], ids=["nothing", "half a hello"])
def test_handshakes_that_never_end_make_room(start_server, files, monkeypatch, sent):
    monkeypatch.setattr(Descriptors, "of_this_process", lambda: Descriptors(40, 0))
    server = start_server(tls_cert=files[0], tls_key=files[1])
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 20))
            with contextlib.suppress(ConnectionError):
                sock.sendall(sent)
        with contextlib.closing(connect(server, files)) as connection:
            connection.request("GET", "/v1/models")
            assert connection.getresponse().status == 200
        server.wait(lambda: server.server.listener.open <= 30)
    server.wait(lambda: not server.server.listener.open)


def test_a_handshake_that_stalls_ends(start_server, files, monkeypatch):
    monkeypatch.setattr(listener, "WAIT_TIMEOUT", 0.3)
    monkeypatch.setattr(listener, "SWEEP", 0.1)
    server = start_server(tls_cert=files[0], tls_key=files[1])
    with socket.create_connection(("127.0.0.1", server.port), 20) as sock:
        sock.sendall(b"\x16\x03\x01")
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1 << 16) == b""
    server.wait(lambda: not server.server.listener.open)
