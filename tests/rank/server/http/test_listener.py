"""Connections that stall make room, clients that do not read are cut, and probes are answered whatever happens."""

import contextlib
import errno
import http.client
import json
import socket
import time

import pytest
from phalanx.rank.server.http import connection, handler, listener
from phalanx.rank.server.http.listener import LOCAL, Descriptors, Listener, name_of

from .... import retries

pytestmark = [pytest.mark.timeout(60), retries.CLOCKS]
HALF_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: local"
HALF_BODY = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n" + b'{"prompt": "x'
ASK = json.dumps({"prompt": "x", "stream": True, "max_tokens": 5}).encode()
STREAM = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(ASK) + ASK

MULTIPART = {"Content-Type": "multipart/form-data; boundary=x"}
FORM = (
    b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n%b\r\n--x--\r\n'
)


@pytest.fixture
def few(monkeypatch, start_server):
    """A server that may have 30 connections, 3 for those that are too many, and 15 of one address."""
    monkeypatch.setattr(Descriptors, "of_this_process", lambda: Descriptors(40, 0))
    return start_server()


@pytest.fixture
def clients():
    """Opens connections to a server that send so much and then nothing."""
    with contextlib.ExitStack() as stack:

        def connect(server, count, data=b""):
            made = []
            for _ in range(count):
                made.append(stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20)))
                made[-1].sendall(data)
            return made

        yield connect


def ended(sock):
    """Read to the end of a connection that the server has closed or reset."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(1 << 16):
            data += part
    return data


def test_how_many_connections_there_may_be():
    for limit, used in ((128, 30), (1024, 30), (1 << 20, 30)):
        found = Descriptors(limit, used)
        assert 0.5 * limit <= found.connections <= limit - used - found.crowded
        assert found.crowded >= 10 and found.per_client == found.connections // 2
    assert Descriptors(16, 30).connections > 0


@pytest.mark.parametrize("data", [b"", HALF_HEAD, HALF_BODY], ids=["idle", "half a head", "half a body"])
def test_those_that_stall_make_room(few, clients, data):
    stalled = clients(few, 100, data)
    few.wait(lambda: sum(len(client.waits) for client in few.server.listener._clients.values()) == 30)
    assert few.post("completions", prompt="x").status == 200
    few.wait(lambda: few.server.listener.open <= 30)
    assert ended(stalled[0]) == b""
    few.wait(lambda: len(few.state.active) <= 30)
    for sock in stalled:
        sock.close()
    few.wait(lambda: few.server.listener.open == 0 and not few.server.listener._clients)


def test_where_all_are_being_answered(few, clients):
    few.scheduler.hold = True
    held = clients(few, 30, STREAM)
    few.wait(lambda: few.link.open_sequences == 30)
    refused = few.post("completions", prompt="x")
    assert (refused.status, refused.body["error"]["code"], refused.headers["Retry-After"]) == (503, "busy", "1")
    assert few.request("GET", "/v1/models").status == 503
    for _ in range(10):  # one after the other
        assert few.request("GET", "/health").status == 200
    few.scheduler.hold = False
    for sock in held:
        sock.settimeout(20)
        assert sock.recv(15) == b"HTTP/1.1 200 OK"
        sock.close()
    few.wait(lambda: few.server.listener.open == 0)
    assert few.post("completions", prompt="x").status == 200


def test_those_one_too_many_do_not_stay(few, clients, monkeypatch):
    monkeypatch.setattr(listener, "CROWDED_LIFE", 0.3)
    few.scheduler.hold = True
    clients(few, 30, STREAM)
    few.wait(lambda: few.link.open_sequences == 30)
    crowd = clients(few, 20)
    few.wait(lambda: len(few.server.listener._crowd) <= 3)
    for sock in crowd:
        assert ended(sock) == b""
    assert not few.server.listener._crowd
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", few.port, timeout=20)) as probe:
        probe.request("GET", "/health")
        assert probe.getresponse().read()
        with pytest.raises((http.client.RemoteDisconnected, OSError)):  # one request, and it is over
            probe.request("GET", "/health")
            probe.getresponse()


def test_an_address_has_half_of_them(few, clients, monkeypatch):
    monkeypatch.setattr(listener, "name_of", lambda address: "192.0.2.1")
    few.scheduler.hold = True
    clients(few, 15, STREAM)
    few.wait(lambda: few.link.open_sequences == 15)
    assert few.post("completions", prompt="x").status == 503
    monkeypatch.setattr(listener, "name_of", lambda address: "192.0.2.2")
    assert few.request("GET", "/v1/models").status == 200


def test_an_address_that_has_most_makes_room_first(few, clients, monkeypatch):
    first = clients(few, 1)
    few.wait(lambda: few.server.listener.open == 1)
    monkeypatch.setattr(listener, "name_of", lambda address: "192.0.2.1")
    clients(few, 100)
    few.wait(lambda: few.server.listener.open == 16)
    monkeypatch.setattr(listener, "name_of", lambda address: "192.0.2.2")
    clients(few, 14)
    few.wait(lambda: few.server.listener.open == 30)
    assert few.request("GET", "/v1/models").status == 200
    first[0].sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert ended(first[0]).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("address", "name"),
    [
        (("127.0.0.1", 5), LOCAL),
        (("::1", 5, 0, 0), LOCAL),
        (("::ffff:127.0.0.1", 5, 0, 0), LOCAL),
        ("", LOCAL),  # a unix socket's
        (("192.0.2.7", 5), "192.0.2.7"),
        (("::ffff:192.0.2.7", 5, 0, 0), "192.0.2.7"),
        (("2001:db8:1:2:3:4:5:6", 5, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 5, 0, 2), "fe80::/64"),
    ],
)
def test_whose_connection_it_is(address, name):
    assert name_of(address) == name


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_without_descriptors_it_waits_instead_of_trying_on(fresh_server, monkeypatch, caplog, code):
    monkeypatch.setattr(listener, "PAUSE", 0.2)
    tries = []

    class Full:
        def __init__(self, sock):
            self.sock = sock

        def accept(self):
            tries.append(time.monotonic())
            if len(tries) < 4:
                raise OSError(code, "no more")
            return self.sock.accept()

        def __getattr__(self, name):
            return getattr(self.sock, name)

    fresh_server.server.listener._sock = Full(fresh_server.server.listener._sock)
    assert fresh_server.post("completions", prompt="x").status == 200
    assert 4 <= len(tries) <= 6 and tries[3] - tries[0] >= 0.5
    assert sum("connection can be accepted" in record.message for record in caplog.records) == 1


def never_read(server, data):
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(20)
    sock.connect(("127.0.0.1", server.port))
    sock.sendall(data)
    return sock


@pytest.fixture
def impatient(monkeypatch, start_server, tmp_path):
    monkeypatch.setattr(listener, "WRITE_TIMEOUT", 0.5)
    monkeypatch.setattr(listener, "SWEEP", 0.1)
    server = start_server(file_store=str(tmp_path / "files"))
    server.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # inherited by accepted connections
    return server


def upload(server, content):
    answer = server.request("POST", "/v1/files", FORM % content, MULTIPART)
    assert answer.status == 200, answer.body
    return answer.body["id"]


def test_a_download_that_is_not_read_is_cut(impatient):
    id = upload(impatient, b"x" * (4 << 20))
    get = f"GET /v1/files/{id}/content HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(never_read(impatient, get))
        impatient.wait(lambda: len(impatient.state.active) == 5)
        impatient.wait(lambda: not impatient.state.active and not impatient.server.listener.open, 20)
    assert len(impatient.request("GET", f"/v1/files/{id}/content").body) == 4 << 20


def test_a_stream_that_is_not_read_is_cut(impatient):
    impatient.scheduler.per_delta = 50
    ask = json.dumps({"prompt": "x", "stream": True, "ignore_eos": True, "max_tokens": 500, "logprobs": 5}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(ask)
    with never_read(impatient, (head + ask) * 20):  # one behind the other, so that their answers are more than it takes
        impatient.wait(lambda: impatient.server.listener._blocked)
        impatient.wait(lambda: not impatient.server.listener.open, 20)
    impatient.wait(lambda: not impatient.link.open_sequences and not impatient.state.active)


def test_a_download_that_is_read_slowly_goes_on(impatient, monkeypatch):
    monkeypatch.setattr(listener, "TAKEN", 4 << 10)
    id = upload(impatient, b"x" * (1 << 20))
    with never_read(impatient, f"GET /v1/files/{id}/content HTTP/1.0\r\nHost: localhost\r\n\r\n".encode()) as sock:
        count = 0
        began = time.monotonic()
        while part := sock.recv(16 << 10):
            count += len(part)
            time.sleep(0.02)
        assert count > 1 << 20 and time.monotonic() - began > 0.6


def test_an_upload_that_stalls_ends(monkeypatch, start_server, tmp_path, clients):
    monkeypatch.setattr(listener, "WAIT_TIMEOUT", 0.4)
    monkeypatch.setattr(listener, "SWEEP", 0.1)
    server = start_server(file_store=str(tmp_path / "files"))
    head = b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n"
    kind = f"Content-Type: {MULTIPART['Content-Type']}\r\n\r\n".encode()
    (sock,) = clients(server, 1, head + kind + FORM[:-20])
    assert ended(sock) == b""
    server.wait(lambda: not server.state.active)
    assert not list((tmp_path / "files" / "files").iterdir())


def test_a_refused_body_is_read_for_so_long(monkeypatch, start_server, clients):
    monkeypatch.setattr(handler, "DISCARD_TIMEOUT", 0.3)
    server = start_server(api_keys=["right"])
    (sock,) = clients(server, 1, HALF_BODY)
    assert ended(sock) == b""
    (sock,) = clients(server, 1, HALF_BODY.replace(b"1000", b"%d" % (200 << 20)))
    assert ended(sock).startswith(b"HTTP/1.1 401 ")  # so much is not read at all
    server.wait(lambda: not server.state.active)


def test_a_connection_that_was_used_and_is_idle_makes_room(few, clients):
    used = clients(few, 30, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    for sock in used:
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
    few.wait(lambda: few.server.listener._clients[LOCAL].waits)
    assert few.post("completions", prompt="x").status == 200
    assert ended(used[0]) == b""


GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (GET + b"".join(b"x%d: y\r\n" % i for i in range(100)) + b"\r\n", 200),
        (GET + b"".join(b"x%d: y\r\n" % i for i in range(200)) + b"\r\n", 431),
        (GET + b"a:\r\n" * 10_000 + b"\r\n", 431),
        (b"GET /health?" + b"a=1&" * 500 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 200),
        (b"GET /health?" + b"a=1&" * 10_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 414),
        (CHUNKED + b"1\r\n \r\n" * 4000 + b"1e\r\n" + b'{"prompt":"x","max_tokens":1}  '[:30] + b"\r\n0\r\n\r\n", 200),
        (CHUNKED + b"1\r\n \r\n" * 10_000 + b"0\r\n\r\n", 400),
        (CHUNKED + b"2\r\n{}\r\n0\r\nX-Trailer: y\r\n\r\n", 400),
        (b"GET /health HTTP/1.0\r\n\r\n", 200),
    ],
    ids=["100 headers", "200 headers", "10,000 headers", "query", "long query", "chunks", "tiny", "trailer", "1.0"],
)
def test_heads_and_chunks_that_take_long_to_read(fresh_server, clients, data, status):
    (sock,) = clients(fresh_server, 1)
    with contextlib.suppress(ConnectionError):
        sock.sendall(data)
    assert sock.recv(12).startswith(b"HTTP/1.1 %d" % status)
    fresh_server.wait(lambda: not fresh_server.state.active)


def test_a_connection_that_is_closed_on_one_side_is_over(fresh_server, clients):
    fresh_server.scheduler.hold = True
    (sock,) = clients(fresh_server, 1, STREAM)
    fresh_server.wait(lambda: fresh_server.link.open_sequences)
    sock.shutdown(socket.SHUT_WR)
    fresh_server.wait(lambda: not fresh_server.link.open_sequences and not fresh_server.server.listener.open)


def test_requests_one_behind_the_other_are_read_one_by_one(fresh_server, clients):
    fresh_server.scheduler.hold = True
    (sock,) = clients(fresh_server, 1, STREAM)
    fresh_server.wait(lambda: fresh_server.link.open_sequences)
    sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            sock.send(STREAM * 1000)
    (stream,) = [one.stream for one in fresh_server.server._connections]
    time.sleep(0.3)
    assert isinstance(stream, connection.Stream) and stream._read_buffer_size <= 256 << 10
    assert fresh_server.link.open_sequences == 1


def test_a_key_of_several_has_half_of_them(monkeypatch, start_server, clients):
    monkeypatch.setattr(Descriptors, "of_this_process", lambda: Descriptors(40, 0))
    server = start_server(api_keys=["first", "second"])
    server.scheduler.hold = True
    clients(server, 15, STREAM.replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer first\r\n\r\n"))
    server.wait(lambda: server.link.open_sequences == 15)
    ask = {"prompt": "x"}
    assert server.request("POST", "/v1/completions", ask, {"Authorization": "Bearer first"}).status == 429
    server.scheduler.hold = False
    assert server.request("POST", "/v1/completions", ask, {"Authorization": "Bearer second"}).status == 200


def test_the_listener_stops(fresh_server):
    assert isinstance(fresh_server.server.listener, Listener)
    fresh_server.call(fresh_server.server.stop)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", fresh_server.port), timeout=2)
