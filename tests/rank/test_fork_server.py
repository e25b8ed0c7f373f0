"""A process that forks workers: what they get, how they end, and where their output goes."""

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from phalanx.rank.fork_server import ForkServer

from .. import retries
from ..processes import wait

pytestmark = [pytest.mark.timeout(60), retries.KILLS]


@pytest.fixture
def start(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    started = []

    def start(settings=b"hello"):
        started.append(ForkServer("tests.rank.forked", settings, "helper"))
        started[-1].start()
        return started[-1]

    yield start
    for one in started:
        one.stop()


@pytest.fixture
def server(start):
    made = start()
    assert made.answer() == (0, "")
    return made


def fork(server):
    worker, sock = server.fork()
    sock.settimeout(20)
    return worker, sock


def ended(server, worker):
    server.end(worker)
    return server.answer()[0]


def test_workers_have_the_settings_and_end_apart(server):
    (first, one), (second, two) = fork(server), fork(server)
    for sock in (one, two):
        sock.send(b"hi")
        assert sock.recv(100) == b"hello"
    one.send(b"crash")
    assert one.recv(100) == b"" and ended(server, first) == -signal.SIGABRT
    two.send(b"loop")
    assert ended(server, second) == -signal.SIGKILL
    third, three = fork(server)
    three.close()
    assert ended(server, third) in (0, -signal.SIGKILL)
    assert ended(server, third) is None
    for sock in (one, two):
        sock.close()


def test_signals_to_all_processes_of_a_job_end_none(server):
    _, sock = fork(server)
    sock.send(b"hi")
    assert sock.recv(100) == b"hello"
    (worker,) = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        os.kill(int(worker), number)
        os.kill(server.pid, number)
    sock.send(b"hi")
    assert sock.recv(100) == b"hello"
    _, other = fork(server)
    other.send(b"hi")
    assert other.recv(100) == b"hello"
    sock.close()
    other.close()


def test_settings_that_cannot_be_read(start):
    broken = start(b"broken")
    assert broken.answer() == (0, "these settings are broken") and broken.answer() is None
    assert broken.stop(10.0) == 0


def test_workers_end_with_the_process(server):
    _, sock = fork(server)
    sock.send(b"loop")
    pid = server.pid
    assert not wait(lambda: not Path(f"/proc/{pid}/task/{pid}/children").read_text(), 10)
    worker = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
    server.kill()
    assert sock.recv(100) == b"" and server.answer() is None and not server.running
    assert not wait(lambda: os.path.exists(f"/proc/{worker}"), 10)
    with pytest.raises(OSError):
        fork(server)
    server.start()
    assert server.answer() == (0, "")
    sock.close()


def test_a_server_that_nobody_has_any_more_ends(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    server = ForkServer("tests.rank.forked", b"", "helper")
    server.start()
    assert server.answer() == (0, "")
    process = server._process
    del server
    gc.collect()
    assert process.wait(10) == 0


def test_what_workers_print_is_logged(server, caplog):
    _, sock = fork(server)
    sock.send(b"print")
    assert not wait(lambda: not any("[1m" in one for one in caplog.messages), 10)
    assert caplog.messages[0].startswith("helper: xxx")
    sock.close()


def test_the_user_s_limit_of_memory_stays():
    code = (
        "import resource\nfrom phalanx.rank.fork_server import limit_memory\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (1 << 40, 1 << 40))\n"
        "limit_memory(1 << 30)\nprint(resource.getrlimit(resource.RLIMIT_DATA)[0] < 2 << 30)\n"
        "limit_memory(1 << 41)\nprint(resource.getrlimit(resource.RLIMIT_DATA) == (1 << 40, 1 << 40))\n"
        "limit_memory(64 << 20)\n"
        "try: bytearray(128 << 20)\n"
        "except MemoryError: print('refused')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout.split() == ["True", "True", "refused"], done.stderr


def test_no_worker_leaves_a_core_dump(server):
    limits = Path(f"/proc/{server.pid}/limits").read_text()
    (line,) = (line for line in limits.splitlines() if line.startswith("Max core file size"))
    assert line.split()[4:6] == ["0", "0"]
