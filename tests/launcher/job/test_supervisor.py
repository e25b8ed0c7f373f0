"""The supervisor with fake ranks: signals, exit codes, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from phalanx.launcher.job import supervisor
from phalanx.rank.options import JOB_ENV, Options, decode_job

from ... import retries
from ...processes import table, tree
from ..jobs import serve

pytestmark = [pytest.mark.timeout(60), retries.KILLS]
ALONE = pytest.param(1, marks=pytest.mark.long)  # without mpirun, as many other tests


def signals():
    """Each once in the short run; one rank, which has no mpirun, hears of the other two as it does of SIGTERM."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        short = 1 if number == signal.SIGTERM else 2
        yield from (pytest.param(n, number, marks=[] if n == short else [pytest.mark.long]) for n in (1, 2))


@pytest.mark.parametrize("ranks, number", list(signals()))
def test_the_first_signal_drains(tmp_path, ranks, number):
    with serve(tmp_path, "--np", str(ranks)) as job:
        job.up(ranks).process.send_signal(number)
        assert job.end() == 0
        assert sorted(job.read("usr1")) == [str(rank) for rank in range(ranks)]
        assert job.read("server-log")[:3] == ["connected", "usr1", "lost"]
        again = "Ctrl-C again" if number == signal.SIGINT else "SIGTERM"
        assert f"ones refused; {again} stops" in job.output
        assert job.no_directory()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A job of two ranks to look at, with a key in a variable."""
    with serve(tmp_path_factory.mktemp("two"), "--np", "2", PHALANX_API_KEY="hush-hush", HF_TOKEN="hush-hush") as job:
        yield job.up(2)


def hushed(job) -> bool:
    """Whether no process of the job, the launcher included, has the key in its environment or command line."""
    pids = tree(job.process.pid)
    assert {job.process.pid, job.server(), job.rank(0), job.rank(1)} <= pids.keys()
    seen = [(Path("/proc") / str(pid) / name).read_bytes() for pid in pids for name in ("environ", "cmdline")]
    return not [one for one in (*seen, *job.read("environs"), *job.read("server-environ")) if "hush-hush" in str(one)]


def test_a_key_in_a_file_is_for_the_server_alone(tmp_path):
    (tmp_path / "key").write_text("hush-hush\n")
    with serve(tmp_path, "--np", "2", "--api-key-file", str(tmp_path / "key")) as job:
        assert hushed(job.up(2))


def test_a_key_in_a_variable_is_for_the_server_alone(two):
    assert hushed(two)


def test_a_unix_socket_goes_at_the_end(short_directory, tmp_path):
    path = short_directory / "http"
    with serve(tmp_path, "--h", f"unix://{path}") as job:
        job.up(1)
        assert path.stat().st_mode & 0o777 == 0o600
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == 0
        assert not path.exists()


def test_the_job_file_goes_when_the_server_alone_is_killed(tmp_path):
    with serve(tmp_path, XDG_STATE_HOME=str(tmp_path)) as job:
        files = job.up(1).place / "phalanx" / "jobs"
        assert len(list(files.iterdir())) == 1
        os.kill(job.server(), signal.SIGKILL)
        assert job.end() in (70, 137)
        assert not list(files.iterdir())


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", [ALONE, 2])
def test_a_drain_is_asked_for_once(tmp_path, ranks):
    with serve(tmp_path, "--np", str(ranks), FAKE="deaf") as job:
        job.up(ranks).process.send_signal(signal.SIGTERM)
        job.until(lambda: len(job.read("heard")) == ranks)
        time.sleep(1.5)  # who repeats a drain does so every second (DRAIN_REPEAT)
        assert len(job.read("heard")) == ranks
        assert job.read("server-log").count("usr1") == 1
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == 130


@pytest.mark.parametrize("ranks", [ALONE, 2])
def test_the_second_signal_stops(tmp_path, ranks):
    with serve(tmp_path, "--np", str(ranks), FAKE="deaf") as job:
        job.up(ranks).process.send_signal(signal.SIGINT)
        job.until(lambda: "draining" in job.output and len(job.read("heard")) == ranks)
        started = time.monotonic()
        job.process.send_signal(signal.SIGINT)
        assert job.end() == 130
        assert time.monotonic() - started < 5
        assert job.no_directory()


def test_a_signal_while_loading_ends_at_once(tmp_path):
    with serve(tmp_path, "--np", "2", FAKE="deaf", FAKE_SERVER="loading") as job:
        job.up(2).process.send_signal(signal.SIGTERM)
        assert job.end() == 0
        assert "phalanx: ending:" in job.output


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("server", "host"),
    [
        ("", "127.0.0.1"),
        pytest.param("", "0.0.0.0", marks=pytest.mark.long),
        ("loading", "127.0.0.1"),
        pytest.param("loading", "0.0.0.0", marks=pytest.mark.long),
        ("hangs", "127.0.0.1"),
        pytest.param("hangs", "0.0.0.0", marks=pytest.mark.long),
        ("rude", "127.0.0.1"),
        pytest.param("rude", "0.0.0.0", marks=pytest.mark.long),
    ],
)
def test_a_proxy_has_no_say_in_it(tmp_path, server, host):
    """Whether requests may be open is asked of the server itself, and where it does not tell, they may be."""
    proxy = {"http_proxy": "http://127.0.0.1:1", "HTTP_PROXY": "http://127.0.0.1:1", "no_proxy": ""}
    with serve(tmp_path, "--h", host, FAKE_SERVER=server, **proxy) as job:
        job.up(1).process.send_signal(signal.SIGINT)
        assert job.end() == 0
        expected = "ending: no request was accepted yet" if server == "loading" else "draining: open requests are"
        assert f"phalanx: {expected}" in job.output


@pytest.mark.parametrize(
    ("fake", "code", "why"),
    [
        ("exit:70@1", 70, "a rank failed"),
        pytest.param("exit:71@0", 71, "a rank was stuck", marks=pytest.mark.long),
        pytest.param("exit:3@1", 3, "the model cannot be read", marks=pytest.mark.long),
        pytest.param("exit:4@0", 4, "not enough memory", marks=pytest.mark.long),
        ("exit:55@1", 1, "an error"),
    ],
)
def test_exit_codes_of_ranks(tmp_path, fake, code, why):
    with serve(tmp_path, "--np", "2", FAKE=fake) as job:
        assert job.end() == code
        assert f"exit code {code}:" in job.output
        assert job.no_directory()


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_killed_rank_is_named(tmp_path, rank):
    with serve(tmp_path, "--np", "2") as job:
        os.kill(job.up(2).rank(rank), signal.SIGKILL)
        assert job.end() == 137
        assert f"killed (rank {rank}" in job.output
        assert "signal 9)" in job.output


def test_one_killed_rank_without_mpirun(tmp_path):
    with serve(tmp_path) as job:
        os.kill(job.up(1).rank(0), signal.SIGKILL)
        assert job.end() == 137


def test_killed_mpirun(tmp_path):
    with serve(tmp_path, "--np", "2", FAKE="deaf child@1") as job:
        job.up(2)
        os.kill(parent_of(job.rank(0)), signal.SIGKILL)
        assert job.end() == 137
        assert "mpirun was killed" in job.output
        assert job.no_directory()


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", [ALONE, 2])
def test_killed_supervisor(tmp_path, ranks):
    with serve(tmp_path, "--np", str(ranks), FAKE="deaf") as job:
        os.kill(job.up(ranks).process.pid, signal.SIGKILL)
        job.gone(10)


@pytest.mark.parametrize("ranks", [ALONE, 2])
def test_killed_server(tmp_path, ranks):
    with serve(tmp_path, "--np", str(ranks)) as job:
        os.kill(job.up(ranks).server(), signal.SIGKILL)
        assert job.end() == 70
        assert "server process" in job.output


def test_killed_server_and_ranks_that_do_not_notice(tmp_path):
    with serve(tmp_path, "--np", "2", FAKE="deaf", PEER_PATIENCE="1") as job:
        os.kill(job.up(2).server(), signal.SIGKILL)
        assert job.end() == 70


def test_a_server_that_cannot_read_the_model(tmp_path):
    with serve(tmp_path, "--np", "2", FAKE="silent", FAKE_SERVER="exit:3") as job:
        assert job.end(40) == 3
        assert "like this model" in job.output


def test_grandchildren_are_cleared(tmp_path):
    with serve(tmp_path, "--np", "2", FAKE="child@1 exit:70@0") as job:
        assert job.end() == 70
        assert len(job.read("child")) == 1


@pytest.mark.parametrize(
    "argv",
    [
        ("--np", "2", "--restarts", "1"),
        pytest.param(("--np", "2"), marks=pytest.mark.long),
        pytest.param(("--restarts", "1"), marks=pytest.mark.long),
    ],
)
def test_the_shell_of_srun(tmp_path, argv):
    """In `srun --pty bash` this process is alone in an MPI job; the ranks that are asked for are started here."""
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
    pmix = {"PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.1.0", "PMIX_SERVER_URI2": "x;tcp4://127.0.0.1:1"}
    with serve(tmp_path, *argv, **step, **pmix) as job:
        job.up(2 if "--np" in argv else 1).process.send_signal(signal.SIGTERM)
        assert job.end() == 0
        assert "draining" in job.output


def test_restarts(tmp_path):
    with serve(tmp_path, "--np", "2", "--restarts", "2", FAKE="once:exit:70@1") as job:
        job.until(lambda: len(job.read("rank-0")) == 2 and len(job.read("up")) == 4)
        job.until(lambda: job.read("server-log") == ["connected", "lost", "connected"])
        assert len(job.read("server")) == 1, "the server stays"
        assert "ranks again (1 restarts" in job.output
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == 0


def test_restarts_run_out(tmp_path):
    with serve(tmp_path, "--restarts", "1", FAKE="exit:71") as job:
        assert job.end(20) == 71
        assert len(job.read("rank-0")) == 2


def test_a_model_that_cannot_be_read_is_not_tried_again(tmp_path):
    with serve(tmp_path, "--restarts", "1", FAKE="exit:3") as job:
        assert job.end() == 3
        assert len(job.read("rank-0")) == 1


def test_a_taken_port(tmp_path):
    with serve(tmp_path) as job:
        port = job.up(1).output.partition("http://127.0.0.1:")[2].partition(";")[0]
        (tmp_path / "second").mkdir()
        with serve(tmp_path / "second", "--p", port) as second:
            assert second.end() == 2
            assert f"phalanx: port {port}" in second.output
            assert second.no_directory()


def test_the_server_is_alone(two):
    """A session of its own, no stdin, and nothing of MPI or of ours in its environment."""
    environ = json.loads((two.place / "server-environ").read_text())
    assert environ["session"] is True
    assert environ["stdin"] == "/dev/null"
    ours = [name for name in environ if name.startswith(("OMPI_", "PMIX_", "PRTE_", "PHALANX_"))]
    assert not ours
    assert "the server is up" in two.output and "rank 1 of 2 is up" in two.output


def test_two_ranks_share_the_cores(two):
    shares = [json.loads(two.read(f"cpus-{rank}")[0].partition("]")[0] + "]") for rank in (0, 1)]
    if len(os.sched_getaffinity(0)) > 1:
        assert not set(shares[0]) & set(shares[1])
    assert set(shares[0]) | set(shares[1]) == os.sched_getaffinity(0)


def test_open_to_all_without_a_key(tmp_path):
    with serve(tmp_path, "--h", "0.0.0.0", "--api-key", "none") as job:
        job.up(1)
        assert "--api-key-file FILE lets" in job.output


def test_exit_code():
    codes = {0: 0, 2: 2, 70: 70, 130: 130, 137: 137, -9: 137, -15: 137, 139: 137, 138: 137, 5: 1, 213: 137}
    assert {code: supervisor.exit_code(code) for code in codes} == codes
    assert supervisor.exit_code(9, mpich=True) == 137
    assert supervisor.exit_code(71, mpich=True) == 71


def parent_of(pid: int) -> int:
    return table()[pid].parent


BOTH_ENDS = """
import os, subprocess, sys, time
from phalanx.launcher.job import supervisor as supervise
code = "import os, sys, time; time.sleep({}); {}"
server, ranks = sys.argv[1:]
server = subprocess.Popen([sys.executable, "-c", code.format(server, "sys.exit(70)")], stdout=subprocess.PIPE)
ranks = [sys.executable, "-c", code.format(ranks, "os.kill(os.getpid(), 9)")]
job = supervise.Supervisor(supervise.LaunchSpec(ranks, dict(os.environ), False), server)
select = job._selector.select
job._selector.select = lambda timeout=None: time.sleep(0.5) or select(timeout)
sys.exit(job.run())
"""


@pytest.mark.parametrize("seconds", [("0", "0.2"), ("0.2", "0")], ids=["server-first", "ranks-first"])
def test_both_ends_seen_at_once(seconds):
    """The ranks' code counts."""
    done = subprocess.run([sys.executable, "-c", BOTH_ENDS, *seconds], capture_output=True, text=True, timeout=30)
    assert done.returncode == 137, done.stderr
    assert "exit code 137:" in done.stderr


def test_ranks_know_the_terminals_width():
    """For rank 0's bar; where stderr is no terminal there is none."""
    for columns in (0, 80):
        start = supervisor.launch_spec(Options(ranks=1), "link", columns)
        assert decode_job(start.environ[JOB_ENV]).columns == columns
