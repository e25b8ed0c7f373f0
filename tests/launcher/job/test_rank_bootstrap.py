"""Under a user's own mpirun: rank 0 starts the server, errors are said once, and nothing outlives the job."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from phalanx.errors import RANK_KILLED, FatalError
from phalanx.launcher.job import mpi_env, mpirun, rank_bootstrap, supervisor
from phalanx.launcher.job.mpi_env import RankPlacement
from phalanx.rank.options import JOB_ENV, Job, Options, encode_job

from ... import retries
from ...processes import gone, kill, tree
from ...ranks import AS_ROOT
from ..jobs import PHALANX, Launched, under_mpirun
from .test_supervisor import parent_of

pytestmark = [pytest.mark.timeout(60), retries.KILLS]


@pytest.fixture(scope="module")
def program():
    return mpirun.find(os.environ).mpirun


def test_rank_0_starts_the_server_and_usr1_drains(tmp_path, program):
    with under_mpirun(tmp_path, program, 2) as job:
        job.up(2)
        environ = json.loads((tmp_path / "server-environ").read_text())
        assert environ["session"] is True
        assert environ["stdin"] == "/dev/null"
        assert not [name for name in environ if name.startswith(("OMPI_", "PMIX_", "PRTE_"))]
        assert parent_of(job.server()) == job.rank(0)
        assert "the server is up" in job.output and job.output.count("rank 0 of 2 is up") == 1
        job.process.send_signal(signal.SIGUSR1)
        assert job.end() == 0
        job.until(job.no_directory, 3)


def test_alone_in_an_mpirun_and_more_ranks_are_wanted(tmp_path, program):
    with under_mpirun(tmp_path, program, 1, "--np", "2") as job:
        job.up(2)
        assert "rank 1 of 2 is up" in job.output
        job.process.send_signal(signal.SIGUSR1)
        assert job.end() == 0


def test_the_key_does_not_reach_the_ranks(tmp_path, program):
    with under_mpirun(tmp_path, program, 2, PHALANX_API_KEY="hush-hush") as job:
        job.up(2)
        ours = tree(job.process.pid).keys() - {job.process.pid}  # a user's own mpirun has it
        assert {job.server(), job.rank(0), job.rank(1)} < ours  # and the watcher, a fork of rank 0's launcher
        assert not [pid for pid in ours if b"hush-hush" in Path(f"/proc/{pid}/environ").read_bytes()]


def test_a_unix_socket_goes_at_the_end(short_directory, tmp_path, program):
    path = short_directory / "http"
    with under_mpirun(tmp_path, program, 2, "--h", f"unix://{path}") as job:
        job.up(2)
        assert path.stat().st_mode & 0o777 == 0o600
        job.process.send_signal(signal.SIGUSR1)
        assert job.end() == 0
        job.until(lambda: not path.exists(), 3)


def test_an_inherited_binding_is_widened(tmp_path, program):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core")
    command = [program, "-np", "2", "--bind-to", "core", "--map-by", "core"]
    words = [sys.executable, PHALANX, "serve", "--p", "0", "--device", "cpu"]
    with Launched([*command, *words], tmp_path, **AS_ROOT) as job:
        job.up(2)
        notes = [job.read(f"cpus-{rank}")[0] for rank in (0, 1)]
        assert all("widened from the inherited" in note for note in notes), notes
        shares = [set(json.loads(note.partition("]")[0] + "]")) for note in notes]
        assert not shares[0] & shares[1]


def test_sigterm_stops(tmp_path, program):
    with under_mpirun(tmp_path, program, 2) as job:
        job.up(2).process.send_signal(signal.SIGTERM)
        assert job.end() != 0
        job.until(job.no_directory, 5)


def test_killed_mpirun(tmp_path, program):
    with under_mpirun(tmp_path, program, 2, FAKE="deaf") as job:
        os.kill(job.up(2).process.pid, signal.SIGKILL)
        job.gone(10)
        job.until(job.no_directory, 5)


@pytest.mark.parametrize("killed", ["mpirun", "both"])
def test_ranks_that_start_after_the_end_of_their_mpirun(tmp_path, killed):
    """One that has been adopted by the supervisor, and one that lost that, too: they would wait for a server."""
    zombie = subprocess.Popen(["true"])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    parent = str(os.getpid() if killed == "mpirun" else zombie.pid)
    job = Job(options=Options(device="cpu"), announced_size=2, server_socket=str(tmp_path / "none"))
    environ = os.environ | {JOB_ENV: encode_job(job), rank_bootstrap.PARENT_ENV: parent}
    done = subprocess.run([sys.executable, *supervisor.BOOTSTRAP], env=environ, timeout=20)
    assert done.returncode == RANK_KILLED
    zombie.wait()


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_rank(tmp_path, program, rank):
    with under_mpirun(tmp_path, program, 2, FAKE="deaf") as job:
        os.kill(job.up(2).rank(rank), signal.SIGKILL)
        assert job.end() == 137
        job.until(job.no_directory, 5)


def test_killed_server(tmp_path, program):
    with under_mpirun(tmp_path, program, 2) as job:
        os.kill(job.up(2).server(), signal.SIGKILL)
        assert job.end() == 70


def test_a_server_that_hangs_does_not_hold_mpirun_up(tmp_path, program):
    with under_mpirun(tmp_path, program, 2, FAKE="deaf") as job:
        job.up(2)
        os.kill(job.server(), signal.SIGSTOP)
        started = time.monotonic()
        os.kill(job.rank(1), signal.SIGKILL)
        assert job.process.wait(10) == 137
        job.gone(10 - (time.monotonic() - started))


def test_the_job_file_goes_when_the_server_alone_is_killed(tmp_path, program):
    with under_mpirun(tmp_path, program, 2, XDG_STATE_HOME=str(tmp_path)) as job:
        files = job.up(2).place / "phalanx" / "jobs"
        assert len(list(files.iterdir())) == 1
        os.kill(job.server(), signal.SIGKILL)
        assert job.process.wait(20) in (70, 137)
        job.until(lambda: not list(files.iterdir()), 10)


@pytest.mark.parametrize(("name", "ended"), [("mpirun", True), ("mpiexec.hydra", True), ("srun", False)])
def test_a_mpirun_that_does_not_end_after_rank_0_is_ended(tmp_path, name, ended):
    """The parent ends as when a node was cut off; what else starts ranks is left alone."""
    program, keeper = tmp_path / name, tmp_path / "keeper.py"
    keeper.write_text(
        "from phalanx.launcher.job import rank_bootstrap as member\nmember.MPIRUN_PATIENCE = 0.2\n"
        "if mpirun := member._mpirun(): member.kill_stuck_mpirun(*mpirun)\n"
    )
    program.write_text(
        f"#!/bin/sh\nsleep 60 & echo $!\nsh -c 'setsid \"{sys.executable}\" {keeper}; echo done; :'\nwait"
    )
    program.chmod(0o755)
    stderr = open(tmp_path / "stderr", "w")  # noqa: SIM115
    with stderr, subprocess.Popen([str(program)], stdout=subprocess.PIPE, stderr=stderr, text=True) as job:
        family = [job.pid, int(job.stdout.readline())]
        try:
            assert job.stdout.readline() == ("" if ended else "done\n")
            assert gone(family, 2 if ended else 0.3) is ended
            want = "phalanx: mpirun waits for a node that does not answer; it is ended 0.2 s after rank 0\n"
            assert (tmp_path / "stderr").read_text() == (want if ended else "")
        finally:
            kill(family)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("argv", "message", "code"),
    [
        (["--prot", "3"], "phalanx: unknown option --prot; did you mean --port?", 2),
        (["--np", "3"], "phalanx: --np 3, but mpirun started 2 ranks: leave --np out", 2),
        (["--restarts", "3"], "phalanx: --restarts works where phalanx starts the ranks itself", 2),
        (["/nowhere"], "phalanx: model '/nowhere': there is no such directory", 3),
        (["--h", "192.0.2.77"], "phalanx: --host '192.0.2.77' is no address of this machine", 2),
    ],
    ids=["flag", "np", "restarts", "model", "host"],
)
def test_errors_are_said_once(tmp_path, program, argv, message, code):
    with under_mpirun(tmp_path, program, 2, *argv) as job:
        assert job.end(20) == code
        assert job.output.count("phalanx:") == 1
        assert message in job.output


def test_notes_are_said_once(tmp_path, program):
    with under_mpirun(tmp_path, program, 2, "--multi-process") as job:
        job.up(2)
        assert job.output.count("phalanx: --multi-process") == 1


@pytest.mark.parametrize(
    ("available", "options", "local_rank", "expected"),
    [
        (0, {}, 0, -1),
        (4, {"device": "cpu"}, 0, -1),
        (4, {}, 2, 2),
        (4, {"devices": (3, 1)}, 1, 1),
        (0, {"devices": (0, 1)}, 1, -1),
    ],
)
def test_the_gpu_of_a_rank(monkeypatch, available, options, local_rank, expected):
    monkeypatch.setattr(mpi_env, "gpus", lambda: available)
    assert rank_bootstrap.device_index(Options(**options), RankPlacement(0, 4, local_rank, 4, "mpirun")) == expected


def test_a_job_whose_ranks_see_a_gpu_each(tmp_path, program):
    """The shell does what srun --gpus-per-task=1 does."""
    each = 'CUDA_VISIBLE_DEVICES=$OMPI_COMM_WORLD_LOCAL_RANK exec "$@"'
    words = [sys.executable, PHALANX, "serve", "--p", "0", "--device", "cuda", "--d", "0,1"]
    command = [program, "-np", "2", "--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE", "sh", "-c", each, "sh"]
    with Launched([*command, *words], tmp_path, **AS_ROOT) as job:
        job.up(2)
        assert sorted(job.read("gpus")) == ["rank 0 on GPU 0", "rank 1 on GPU 0"]
        assert job.output.count("--d 0,1 chooses nothing") == 1
        job.process.send_signal(signal.SIGUSR1)
        assert job.end() == 0


def test_one_gpu_for_the_ranks_that_phalanx_starts(tmp_path):
    words = ["--device", "cuda", "--np", "2"]
    with Launched([sys.executable, PHALANX, "serve", "--p", "0", *words], tmp_path, CUDA_VISIBLE_DEVICES="5") as job:
        assert job.end(20) == 2
        assert "index 1 (CUDA_VISIBLE_DEVICES=5," in job.output


@pytest.mark.parametrize(("devices", "expected"), [((), 0), ((0,), 0), ((0, 1, 2, 3), 0), ((3, 2, 1, 0), 0)])
@pytest.mark.parametrize("local_rank", [0, 3])
def test_ranks_that_were_given_a_gpu_each(monkeypatch, devices, expected, local_rank):
    """Ranks as by srun --gpus-per-task=1: each sees its own alone, whatever the number of it is elsewhere."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(local_rank))
    place = RankPlacement(local_rank, 4, local_rank, 4, "srun")
    assert rank_bootstrap.device_index(Options(devices=devices), place, own=True) == expected


def test_ranks_that_share_what_they_see(monkeypatch):
    """Ranks that phalanx starts itself have one environment: one GPU is not one for each."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    with pytest.raises(FatalError, match="1 GPU: .*index 1 .CUDA_VISIBLE_DEVICES=5,"):
        rank_bootstrap.device_index(Options(), RankPlacement(1, 2, 1, 2, "mpirun"))


def test_a_list_for_fewer_ranks_than_were_given_a_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(FatalError, match="lists 2 devices") as stop:
        rank_bootstrap.device_index(Options(devices=(0, 1)), RankPlacement(2, 4, 2, 4, "srun"), own=True)
    assert stop.value.code == 2


@pytest.mark.parametrize("own", [True, False])
def test_indices_count_the_visible_gpus(monkeypatch, own):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    place = RankPlacement(0, 2, 0, 2, "mpirun")
    assert rank_bootstrap.device_index(Options(devices=(2, 3)), place, own) == 2
    with pytest.raises(FatalError, match="4 GPUs: .*index 4 .CUDA_VISIBLE_DEVICES=4,5,6,7,"):
        rank_bootstrap.device_index(Options(devices=(4, 5)), place, own)


@pytest.mark.parametrize("value", ["MIG-a,MIG-b"])
def test_mig_devices_that_ranks_would_share(monkeypatch, value):
    """CUDA shows a process the first one only."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    with pytest.raises(FatalError, match="1 GPU.*MIG"):
        rank_bootstrap.device_index(Options(), RankPlacement(1, 2, 1, 2, "mpirun"))


@pytest.mark.parametrize(
    ("options", "local_rank", "message"),
    [
        ({"devices": (0, 1)}, 2, "--d lists 2 devices, but HOST has more ranks"),
        ({"devices": (0, 1)}, 3, ""),
        ({"devices": (7,)}, 0, "HOST has 2 GPUs: there is none with index 7"),
        ({}, 2, "HOST has 2 GPUs: there is none with index 2"),
    ],
)
def test_a_rank_without_a_gpu(monkeypatch, options, local_rank, message):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(mpi_env, "gpus", lambda: 2)
    monkeypatch.setattr(mpi_env, "hostname", lambda: "HOST")
    with pytest.raises(FatalError) as stop:
        rank_bootstrap.device_index(Options(**options), RankPlacement(0, 4, local_rank, 4, "mpirun"))
    assert (str(stop.value), stop.value.code) == (message, 2)


def test_a_server_that_does_not_start(monkeypatch):
    monkeypatch.setattr(rank_bootstrap, "SERVER_PATIENCE", 0.05)
    with pytest.raises(FatalError) as stop:
        rank_bootstrap._await_socket("/nowhere/link")
    assert "server process" in str(stop.value) and "0.05 s" in str(stop.value) and stop.value.code == 70
