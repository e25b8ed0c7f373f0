"""A server process that is stopped, as by a debugger or a hanging file system, ends the job with its cause."""

import os
import signal
import subprocess
import sys
import time

import pytest
from phalanx import errors
from phalanx.launcher.job import mpirun
from phalanx.rank.server import server_registry

from .. import retries
from ..batch import Job, requests
from ..checkpoints import make_checkpoint
from ..processes import wait
from ..ranks import AS_ROOT
from ..server import Server, Stream

pytestmark = [pytest.mark.long, pytest.mark.timeout(100), retries.KILLS]
TIMEOUT = 5  # seconds: two ranks have to join within it, on a machine that others use too
OPTIONS = ("--device", "cpu", "--mem", "64", "--timeout", f"{TIMEOUT}")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("stopped") / "tiny", max_position_embeddings=32768))


@pytest.mark.parametrize(
    ("ranks", "own", "busy"),
    [(("--np", "1", "--restarts", "2"), False, False), (("--np", "2"), False, True), ((), True, False)],
    ids=["idle-one-rank", "busy-two-ranks", "idle-users-mpirun"],
)
def test_it_is_killed_and_named(checkpoint, tmp_path, ranks, own, busy):
    command = mpirun.command(mpirun.find(os.environ), 2, []) if own else []
    environ = AS_ROOT | {"XDG_STATE_HOME": str(tmp_path)}
    with Server(checkpoint, *ranks, *OPTIONS, command=command, **environ) as server:
        files = server_registry.directory(environ)
        assert len(list(files.iterdir())) == 1
        stream = Stream(server) if busy else None
        os.kill(pid := server.server_pid, signal.SIGSTOP)
        assert server.exit_code(60) == errors.RANK_STUCK, server.output
        assert f"server process (pid {pid})" in server.output
        assert not server.left() and not wait(lambda: list(files.iterdir()), 10)
        if stream is not None:
            stream.rest()


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_stopped_rank_that_is_alone_is_killed_too(checkpoint, restarts):
    """The others find one stopped rank among several."""
    with Server(checkpoint, "--np", "1", "--restarts", str(restarts), *OPTIONS) as server:
        (pid,) = server.ranks
        os.kill(pid, signal.SIGSTOP)
        if restarts:
            assert not wait(lambda: server.request("/health")[0] == 200, 30)
            assert not wait(lambda: server.request("/health")[0] != 200, 60), server.output
            assert server.request("/v1/completions", {"prompt": "Hello", "max_tokens": 2})[0] == 200
        else:
            assert server.exit_code(60) == errors.RANK_KILLED, server.output
            assert not server.left()
        assert f"rank 0 (pid {pid})" in server.output


def test_a_stopped_and_continued_job_goes_on(checkpoint):
    """All of it, as Slurm's `scontrol suspend` does."""
    with Server(checkpoint, "--np", "2", *OPTIONS) as server:
        pids = [server.server_pid, *server.ranks]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                os.kill(pid, number)
            time.sleep(TIMEOUT + 2)  # longer than a process may be silent
        assert server.request("/v1/completions", {"prompt": "Hello", "max_tokens": 2})[0] == 200, server.output


LIBRARY = """
import os, signal, sys, time
import phalanx
with phalanx.LLM(sys.argv[1], device="cpu", mem=64, timeout=3) as llm:
    print(len(llm.generate(["a"])), flush=True)
    if os.fork() == 0:
        time.sleep(4)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
    print(len(llm.generate(["a"])), flush=True)
"""


def test_a_program_that_uses_the_library_may_be_stopped(checkpoint):
    """Ctrl-Z and `fg`, or a computation that never lets the event loop's thread run."""
    done = subprocess.run([sys.executable, "-c", LIBRARY, checkpoint], capture_output=True, text=True, timeout=90)
    assert done.stdout == "1\n1\n", done.stderr


def test_a_batch_job_ends_too(checkpoint, tmp_path):
    requests(tmp_path / "in.jsonl", 3000, 200)
    with Job(tmp_path, checkpoint, "-i", "in.jsonl", "-o", "out.jsonl", *OPTIONS) as job:
        job.until(lambda: (tmp_path / "out.jsonl.journal").exists() and "KV cache" in job.output)
        os.kill(pid := job.pid("-m phalanx.rank.server.batch"), signal.SIGSTOP)
        assert job.end() == errors.RANK_STUCK, job.output
        assert f"(pid {pid})" in job.output and not job.left()
