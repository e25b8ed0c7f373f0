"""A server that may open 128 descriptors, and clients that hold them."""

import contextlib
import http.client
import json
import os
import socket
import threading
import time
import urllib.parse

import psutil
import pytest

from .. import retries
from ..checkpoints import make_checkpoint
from ..fields import each
from ..server import Server, Stream

pytestmark = [pytest.mark.long, pytest.mark.timeout(100), retries.CLOCKS]
LIMIT = 128
FEW = ("bash", "-c", f'ulimit -n {LIMIT}; exec "$@"', "bash")
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"
STALLS = {"idle": b"", "half a head": HEAD, "half a body": HEAD + b'\r\n{"prompt": "x'}
ASK = {"prompt": [5, 6, 7], "max_tokens": 2}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    place = tmp_path_factory.mktemp("descriptors")
    model = str(make_checkpoint(place / "tiny", max_position_embeddings=32768))
    options = ("--np", "1", "--device", "cpu", "--mem", "64", "--file-store", str(place / "files"))
    with Server(model, *options, command=FEW) as one:
        yield one


@contextlib.contextmanager
def connections(server, count, data=b""):
    """So many connections that send this and then nothing."""
    url = urllib.parse.urlsplit(server.url)
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            made.append(stack.enter_context(socket.create_connection((url.hostname, url.port), timeout=30)))
            with contextlib.suppress(ConnectionError):
                made[-1].sendall(data)
        yield made


def descriptors(server):
    return psutil.Process(server.server_pid).num_fds()


def check_calm(server, before):
    """It logs a line or two, no tracebacks, and keeps descriptors for itself."""
    assert len(server.lines) - before <= 3 and "Traceback" not in server.output, server.output[-3000:]
    assert descriptors(server) < LIMIT - 10


@pytest.mark.parametrize("kind", STALLS)
def test_two_hundred_that_stall(server, kind):
    before = len(server.lines)
    process = psutil.Process(server.server_pid)
    with connections(server, 200, STALLS[kind]):
        for _ in range(20):
            assert server.request("/v1/completions", ASK)[0] == 200
            assert server.request("/health")[0] == 200
        took = sum(process.cpu_times()[:2])
        time.sleep(2)
        assert sum(process.cpu_times()[:2]) - took < 0.5  # it waits instead of trying on and on
        check_calm(server, before)
    assert server.request("/v1/completions", ASK)[0] == 200


def test_all_are_answered(server):
    before = len(server.lines)
    with contextlib.ExitStack() as stack:
        streams = []
        for _ in range(2 * LIMIT):
            try:
                streams.append(Stream(server, 30000))
            except OSError as error:  # HTTPError is one
                assert error.code == 503 and len(streams) > LIMIT // 2
                break
            stack.callback(streams[-1].answer.close)
        else:
            raise AssertionError("none was refused")
        for _ in range(10):
            assert server.request("/health")[0] == 200
        assert server.request("/v1/completions", ASK)[0] == 503
        assert streams[0].answer.readline() is not None
        check_calm(server, before)
    deadline = time.monotonic() + 30
    while server.request("/v1/completions", ASK)[0] != 200:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_downloads_that_are_not_read_hold_a_descriptor_each(server):
    form = (
        b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\nContent-Disposition: form-data; '
        b'name="file"; filename="a"\r\n\r\n' + os.urandom(16 << 20) + b"\r\n--x--\r\n"
    )
    status, file, _ = server.request("/v1/files", form, **{"Content-Type": "multipart/form-data; boundary=x"})
    assert status == 200, file
    before = descriptors(server)
    get = f"GET /v1/files/{file['id']}/content HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    with connections(server, 20, get) as open_ones:
        for sock in open_ones:
            assert sock.recv(15) == b"HTTP/1.1 200 OK"
        time.sleep(1)
        assert descriptors(server) <= before + 20 + 8  # the threads that read
        assert server.request("/v1/completions", ASK)[0] == 200
    status, listed, _ = server.request("/v1/files")
    assert status == 200
    assert each(listed["data"], "id") == [file["id"]]


def test_a_flood_of_connections_beside_honest_clients(server):
    before = len(server.lines)
    url = urllib.parse.urlsplit(server.url)
    until = time.monotonic() + 4
    opened = []

    def flood():
        while time.monotonic() < until:
            with connections(server, 20):
                opened.append(20)

    threads = [threading.Thread(target=flood) for _ in range(2)]
    stream = Stream(server, 30000)
    for thread in threads:
        thread.start()
    good = bad = 0
    while time.monotonic() < until:
        try:
            with contextlib.closing(http.client.HTTPConnection(url.hostname, url.port, timeout=30)) as client:
                client.request("POST", "/v1/completions", json.dumps(ASK))
                good += client.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            bad += 1
    for thread in threads:
        thread.join(30)
    # A connection may be cut off before its request is read: it is the one that has been silent longest.
    assert sum(opened) > 200 and good > bad and good > 5, (sum(opened), good, bad)
    assert stream.answer.readline() is not None and not stream.answer.isclosed()
    stream.answer.close()
    check_calm(server, before)
