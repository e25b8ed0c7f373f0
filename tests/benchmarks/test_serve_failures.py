"""benchmarks/serve.py where something fails: a request, a server that is none, a flag."""

import contextlib
import re
import socket
import threading

import pytest

from .conftest import SMALL


@pytest.mark.parametrize("how", [429, 503, 500, "cut", "endless"])
def test_retries(bench, server, how):
    server.plan = [how, how]
    got = bench("--batch", 1, "--input-len", 50, "--output-len", 3, "--print-request-metrics")
    assert got.code == 0
    assert "1 requests in" in got.out and "0 failed, 2 retries" in got.out and "length, 2 retries" in got.out
    assert len(server.bodies) == 3 and server.bodies[0] == server.bodies[2]


@pytest.mark.parametrize(("how", "reason"), [
    (400, "HTTP 400: no room for 1"),
    (429, "HTTP 429: no room for 1"),
    ("cut", "the server closed the connection in the middle of its answer"),
    ("endless", "the stream ended without a finish_reason"),
    ("no usage", "the server sent no usage though stream_options.include_usage asked for it"),
    ("error", "the stream ended with an error: a rank was lost"),
    ("junk", "an event that is no chunk"),
    ("hang", "no whole answer within 0.3 s"),
])  # fmt: skip
def test_failures(bench, server, how, reason):
    server.plan = [how]
    got = bench(
        "--batch",
        3,
        "--input-len",
        50,
        "--output-len",
        3,
        "--max-retries",
        0,
        "--timeout",
        0.3 if how == "hang" else 10,
        "--concurrency",
        1,
        "--print-request-metrics",
    )
    assert got.code == 1
    assert re.search("^3 requests.* 1 failed", got.out, re.M)
    assert re.search(rf"failures:\n +1 × {re.escape(reason)}", got.out)
    assert f"failed: {reason}" in got.out and "6 output" in got.out


def test_failures_that_differ_in_numbers_are_one_line(bench, server):
    server.plan = [400] * 3
    got = bench(*SMALL, "--concurrency", 1)
    assert re.search(r" 3 × HTTP 400.*\n$", got.out)


def test_nothing_worked(bench, server):
    server.plan = [400] * 4
    got = bench(*SMALL)
    assert got.code == 1 and re.search(r"^TTFT ms( +-){5}$", got.out, re.M)


@pytest.mark.parametrize(("flags", "message"), [
    (["--concurency", "3"], "there is no flag --concurency, did you mean --concurrency?"),
    (["--batches", "3"], "there is no flag --batches, did you mean --batch?"),
    (["--batch", "0"], "argument --num-prompts/--batch: 0 is less than 1"),
    (["--batch", "x"], "argument --num-prompts/--batch: invalid integer value: 'x'"),
    (["--request-rate", "-1"], "argument --request-rate: -1 is not a number from 0 on"),
    (["--timeout", "soon"], "argument --timeout: invalid number value: 'soon'"),
    (["--input-lens", "3,,4"], "argument --input-lens: '3,,4' is not a list of lengths such as 128,512,2048"),
    (["--token-ids", "--endpoint", "chat"], "--token-ids needs --endpoint completions: a chat takes text only"),
    (["--token-ids", "--history-turns", "1"], "--history-turns, --image and --thinking need --endpoint chat"),
    (["--token-ids", "--image", "9"], "--history-turns, --image and --thinking need --endpoint chat"),
    (["--base-url", "ftp://x"], "--base-url ftp://x: expected http://HOST:PORT or https://…"),
    (["--base-url", "http://x:1", "--port", "2"],
     "--base-url http://x:1 has another port than --port 2: give one of them"),
    (["--base-url", "http://x:99999"], "--base-url http://x:99999: Port out of range 0-65535"),
    (["--json", "/nowhere/x"], "--json /nowhere/x: No such file or directory"),
])  # fmt: skip
def test_wrong_flags(bench, flags, message):
    got = bench(*flags, port=False)
    assert (got.code, got.out, got.err) == (2, "", f"serve.py: {message}\n")


def listener(answer):
    """A port where every connection gets these bytes."""
    sock = socket.create_server(("127.0.0.1", 0))

    def run():
        with contextlib.suppress(OSError):
            while True:
                peer, _ = sock.accept()
                peer.recv(65536)
                peer.sendall(answer)
                peer.close()

    threading.Thread(target=run, daemon=True).start()
    return sock


@pytest.mark.parametrize(("answer", "message"), [
    (b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 39\r\n\r\n" + b'{"error": {"message": "a key is needed"}}'[:39],
     "HTTP 401: "),
    (b"HTTP/1.1 401 No\r\nTransfer-Encoding: chunked\r\n\r\n20\r\n"
     b'{"error":{"message": "no key"}} \r\n0\r\n\r\n', "HTTP 401: no key"),
    (b"HTTP/1.1 200 OK\r\n\r\n<html>hello</html>", "/v1/models is not JSON"),
    (b"SSH-2.0-OpenSSH_9\r\n\r\n", "the answer is not HTTP/1.1"),
    (b"", "the server closed the connection without an answer"),
])  # fmt: skip
def test_unusable_servers(bench, answer, message):
    with listener(answer) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        got = bench("--base-url", url, port=False)
        sock.shutdown(socket.SHUT_RDWR)
    assert got.code == 1 and got.out == "" and got.err.startswith(f"serve.py: {url}: ") and message in got.err
    assert got.err.count("\n") == 1


def test_no_server(bench):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    got = bench("--base-url", f"http://localhost:{port}", port=False)
    assert got.code == 1
    assert f"localhost port {port}: refused," in got.err
