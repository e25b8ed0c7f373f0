"""A log that nobody reads: the job serves, streams and ends as if it were read. Malformed requests cannot fill it."""

import fcntl
import os
import re
import signal
import socket
import threading

import pytest

from .. import retries
from ..checkpoints import make_checkpoint
from ..processes import kill, wait
from ..ranks import under_mpirun
from ..server import Server, Stream

pytestmark = [pytest.mark.long, retries.CLOCKS]

ARGUMENTS = ("--np", "2", "--device", "cpu", "--mem", "64", "--timeout", "10")
MALFORMED = b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Odd: " + b"\x01\x9b" * 30_000 + b"\r\n\r\n"
PIPE = 1 << 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("unread") / "tiny", max_position_embeddings=32768))


class Unread(Server):
    """A server whose output is read until it is ready, and again from `read_on` on. Its pipe is full by then."""

    def __init__(self, *arguments: str, **more):
        self._read_on = threading.Event()
        super().__init__(*arguments, **more)
        fill(self.process.stdout.fileno())

    def _read(self) -> None:
        for line in self.process.stdout:
            self.take(line)
            if self._ready.is_set() and not self._read_on.wait(120):
                return

    def read_on(self) -> None:
        self._read_on.set()

    def close(self) -> None:
        self.read_on()
        super().close()


def fill(reading: int) -> None:
    """Fill the pipe that is read there."""
    fcntl.fcntl(reading, fcntl.F_SETPIPE_SZ, PIPE)
    writing = os.open(f"/proc/self/fd/{reading}", os.O_WRONLY | os.O_NONBLOCK)
    try:
        while True:
            os.write(writing, b"." * 4095 + b"\n")
    except BlockingIOError:
        os.close(writing)


def attack(server: Server, times: int) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for _ in range(times):
        with socket.create_connection((host, int(port)), 30) as client:
            client.sendall(MALFORMED)
            assert client.recv(100).startswith(b"HTTP/1.1 400")


def test_a_full_pipe_stops_nothing(checkpoint):
    with Unread(checkpoint, *ARGUMENTS, "--access-log") as server:
        stream = Stream(server, 300)
        attack(server, 60)
        for _ in range(100):
            assert server.request("/health")[0] == 200
        assert stream.rest().rstrip().endswith("[DONE]")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        assert not server.left()


def test_the_last_words_are_there_for_who_reads_again(checkpoint):
    with Unread(checkpoint, *ARGUMENTS) as server:
        stream = Stream(server)
        attack(server, 60)
        kill([server.ranks[1]])
        server.read_on()
        assert server.exit_code() == 137
        assert "has died" in server.output and "exit code 137" in server.output
        assert '"error"' in stream.rest()
        assert not server.left()


def test_a_killed_rank_ends_the_job_while_nobody_reads(checkpoint):
    with Unread(checkpoint, *ARGUMENTS) as server:
        stream = Stream(server)
        attack(server, 20)
        kill([server.ranks[1]])
        assert server.process.wait(30) == 137
        assert '"error"' in stream.rest()
        assert not server.left()


def test_under_a_users_own_mpirun(checkpoint):
    """mpirun may wait for its reader; the ranks and the server process do not wait for mpirun."""
    with Unread(checkpoint, *ARGUMENTS[2:], command=under_mpirun(2)) as server:
        stream = Stream(server, 300)
        attack(server, 60)
        for _ in range(100):
            assert server.request("/health")[0] == 200
        assert stream.rest().rstrip().endswith("[DONE]")


def test_malformed_requests_are_cut_and_counted(checkpoint):
    with Server(checkpoint, *ARGUMENTS) as server:
        before = len(server.output)
        attack(server, 400)
        assert not wait(lambda: "left out" not in server.output[before:], 20), server.output[-500:]
        log = server.output[before:]
        assert len(log) < 200 * 2100 and max(map(len, log.splitlines())) < 2100
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", log)
        shown = log.count("Malformed")
        assert 10 < shown < 400
        assert not wait(lambda: shown_and_counted(server.output[before:]) != 400, 20)


def shown_and_counted(log: str) -> int:
    return log.count("Malformed") + sum(map(int, re.findall(r"(\d+) more lines", log)))
