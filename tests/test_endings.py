"""How a job ends: in order, by signals, and by the loss of any of its processes. Nothing is left behind, ever."""

import os
import signal
import socket
import time

import pytest

from . import retries
from .checkpoints import make_checkpoint
from .processes import kill, wait
from .ranks import under_mpirun
from .server import Server, Stream

pytestmark = retries.KILLS

ARGUMENTS = ("--np", "2", "--device", "cpu", "--mem", "64", "--timeout", "10")
HOST = socket.gethostname()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("endings") / "tiny", max_position_embeddings=32768))


def victim(server: Server, kind: str) -> int:
    return {"follower": lambda: server.ranks[1], "rank 0": lambda: server.ranks[0], "server": lambda: server.server_pid,
            "mpirun": lambda: server.mpirun, "launcher": lambda: server.process.pid}[kind]()  # fmt: skip


CODES = {"follower": 137, "rank 0": 137, "server": 70, "mpirun": 137, "launcher": -signal.SIGKILL}
# rank/test_faults.py and launcher/job/test_supervisor.py have short tests of the others, and the first the rest.
SHORT = [("follower", "load")]
REST = [("follower", "idle"), ("mpirun", "idle"), ("rank 0", "load")]
LONG = [(kind, when) for kind in CODES for when in ("load", "idle", "loading") if (kind, when) not in SHORT + REST]


@pytest.mark.parametrize("kind, when", [*SHORT, *(pytest.param(*one, marks=pytest.mark.long) for one in LONG)])
def test_sigkill(checkpoint, kind, when):
    """SIGKILL one process; the job ends with the documented code, its clients get an error, nothing is left."""
    with Server(checkpoint, *ARGUMENTS, wait=when != "loading") as server:
        stream = Stream(server) if when == "load" else None
        if when == "loading":
            server.wait_ranks(2)
        kill([victim(server, kind)])
        start = time.monotonic()
        assert server.exit_code() == CODES[kind], server.output
        assert not server.left(10 - (time.monotonic() - start)), server.output
        if stream is not None:
            rest = stream.rest()
            assert "[DONE]" not in rest
            if kind not in ("server", "launcher"):
                assert '"error"' in rest, rest[-300:]
        if kind == "follower" and when != "loading":
            assert f"{HOST} has died" in server.output
        assert when != "loading" or "Phalanx is ready" not in server.output


@pytest.mark.long
def test_a_stopped_follower_is_named_to_the_client(checkpoint):
    with Server(checkpoint, *ARGUMENTS) as server:
        stream = Stream(server)
        os.kill(server.ranks[1], signal.SIGSTOP)
        assert server.exit_code(20) == 71
        want = f"rank 1 on {HOST} did not answer for 10 s"
        assert want in server.output and want in stream.rest()
        assert not server.left()


def test_the_first_signal_drains(checkpoint):
    """Others than SIGTERM drain in launcher/job/test_supervisor.py."""
    with Server(checkpoint, *ARGUMENTS) as server:
        stream = Stream(server, 1200)  # more than is computed before the next request
        server.process.send_signal(signal.SIGTERM)
        until = time.monotonic() + 15
        status = 200
        while status == 200 and time.monotonic() < until:
            status, body, _ = server.request("/v1/completions", {"prompt": "a", "max_tokens": 1})
        assert status == 503, (body, server.output)
        rest = stream.rest()
        assert rest.rstrip().endswith("[DONE]"), rest[-300:]
        assert server.exit_code(30) == 0, server.output
        assert "draining" in server.output
        assert not server.left()


@pytest.mark.long
def test_the_second_signal_stops(checkpoint):
    with Server(checkpoint, *ARGUMENTS) as server:
        streams = [Stream(server) for _ in range(2)]
        server.process.send_signal(signal.SIGINT)
        assert not wait(lambda: "draining" not in server.output, 10), server.output
        server.process.send_signal(signal.SIGINT)
        assert server.exit_code() == 130, server.output
        assert all("[DONE]" not in stream.rest() for stream in streams)
        assert not server.left()


def test_ctrl_c_while_loading(checkpoint):
    with Server(checkpoint, *ARGUMENTS, wait=False) as server:
        server.wait_ranks(2)
        server.process.send_signal(signal.SIGINT)
        assert server.exit_code() == 0
        assert "phalanx: ending:" in server.output
        assert not server.left()


@pytest.mark.long
def test_restarts(checkpoint):
    """The port stays open: 503 with Retry-After while the ranks come back, then answers again."""
    ask = ("/v1/completions", {"prompt": "a", "max_tokens": 2})
    with Server(checkpoint, *ARGUMENTS, "--restarts", "1") as server:
        pid, stream = server.server_pid, Stream(server)
        os.kill(server.ranks[1], signal.SIGKILL)
        assert '"error"' in stream.rest()
        seen = []

        def away() -> bool:
            status, body, headers = server.request(*ask)
            assert status == 200 or "Retry-After" in headers, body
            seen.append(status)
            return status != 200

        assert not wait(away, 80), server.output
        assert set(seen) == {503, 200}
        assert "ranks again (0 restarts" in server.output
        assert server.server_pid == pid and len(server.ranks) == 2
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0, server.output
        assert not server.left()


@pytest.mark.long
def test_under_a_users_own_mpirun(checkpoint):
    """The program without a supervisor, so rank 0 starts the server. SIGUSR1 to mpirun drains."""
    command = (*under_mpirun(2), "--allow-run-as-root")
    devices = ("--d", "0,1,2,3,4,5,6,7", "--device", "cpu")  # a list for the largest node, of which less is used
    with Server(*devices, "--w", str(checkpoint), "--mem", "64", command=command) as server:
        stream = Stream(server, 200)
        server.process.send_signal(signal.SIGUSR1)
        assert stream.rest().rstrip().endswith("[DONE]")
        assert server.exit_code() == 0, server.output
        assert not server.left()


@pytest.mark.long
def test_a_drain_that_is_asked_for_while_loading_is_not_lost(checkpoint):
    command = under_mpirun(2)
    with Server(checkpoint, "--device", "cpu", "--mem", "64", command=command, wait=False) as server:
        server.wait_ranks(2)
        server.process.send_signal(signal.SIGUSR1)
        assert server.exit_code(30) == 0, server.output
        assert not server.left()
