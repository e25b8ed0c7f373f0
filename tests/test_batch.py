"""`phalanx batch` as a user runs it: on two CPU ranks, stopped and killed in every way, and started again."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from safetensors.torch import load_file, save_file

from . import retries
from .batch import Job, answers, files, finished, read, requests
from .checkpoints import make_checkpoint
from .processes import kill
from .ranks import under_mpirun

pytestmark = retries.KILLS

RANKS = ("--device", "cpu", "--mem", "64", "--timeout", "20")
SLOW = ("--max-num-seqs", "1")  # what is to be interrupted is not over before


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("batch") / "tiny", max_position_embeddings=8192)


def test_a_file_of_requests(checkpoint, tmp_path):
    """Under the supervisor; stopped with Ctrl-C, started again, and a third time for nothing."""
    names = requests(tmp_path / "in.jsonl", 60)
    with open(tmp_path / "in.jsonl", "a") as file:
        file.write("nonsense\n")
    command = (str(checkpoint), "--np", "1", *RANKS, "-i", "in.jsonl", "-o", "out.jsonl", "--max-num-seqs", "8",
               "--ordered", "--summary", "sum.json")  # fmt: skip
    journal = tmp_path / "out.jsonl.journal"
    with Job(tmp_path, *command, *SLOW) as job:
        job.until(lambda: finished(journal) > 10)
        job.process.send_signal(signal.SIGINT)
        assert job.end() == 75, job.output
        assert "stopping, asked" in job.output and "same command goes" in job.output
        assert not job.left()
    done = finished(journal)
    assert 10 < done < 60 and files(tmp_path) == {"out.jsonl.journal", "sum.json"}
    with Job(tmp_path, *command) as job:
        assert job.end() == 0, job.output
        assert f"{done} finished requests" in job.output
        assert not job.left()
    assert list(answers(tmp_path / "out.jsonl")) == names
    assert [(one["line"], one["error"]["code"]) for one in read(tmp_path / "out.errors.jsonl")] == [
        (61, "invalid_json")
    ]
    assert files(tmp_path) == {"out.jsonl", "out.errors.jsonl", "sum.json"}
    told = json.loads((tmp_path / "sum.json").read_text())
    assert told["total"] == {**told["total"], "requests": 61, "answered": 60, "failed": 1}
    assert told["run"]["requests"] == 61 - done
    assert told["energy_joules"] is None
    with Job(tmp_path, *command) as job:
        assert job.end() == 0
        assert re.fullmatch(f"phalanx: {tmp_path}/out.jsonl .*already.*\n", job.output)


@pytest.mark.long
def test_under_a_users_own_mpirun(checkpoint, tmp_path):
    """No supervisor: the ranks end with the job's code."""
    names = requests(tmp_path / "in.jsonl", 240, 60)
    launcher = under_mpirun(2)
    command = (str(checkpoint), *RANKS, "-i", "in.jsonl", "-o", "out.jsonl", "--max-num-seqs", "8")
    with Job(tmp_path, *command, *SLOW, command=launcher) as job:
        job.until(lambda: finished(tmp_path / "out.jsonl.journal") > 5)
        job.process.send_signal(signal.SIGUSR1)
        assert job.end() == 75, job.output
        assert "phalanx: unfinished: asked" in job.output
        assert not job.left()
    with Job(tmp_path, *command, command=launcher) as job:
        assert job.end() == 0, job.output
        assert not job.left()
    assert sorted(answers(tmp_path / "out.jsonl")) == sorted(names)


@pytest.mark.long
def test_standard_input(checkpoint, tmp_path):
    """One rank. The requests are answered while they come; the end of the input ends the job."""
    names = requests(tmp_path / "in.jsonl", 12)
    lines = (tmp_path / "in.jsonl").read_bytes().splitlines(keepends=True)
    source, sink = os.pipe()
    command = (str(checkpoint), *RANKS, "-i", "-", "-o", "out.jsonl")
    with open(source, "rb") as stdin, open(sink, "wb", 0) as pipe, Job(tmp_path, *command, stdin=stdin) as job:
        stdin.close()
        pipe.write(b"".join(lines[:6]))
        job.until(lambda: finished(tmp_path / "out.jsonl.journal") == 6)
        pipe.write(b"".join(lines[6:]))
        pipe.close()
        assert job.end() == 0, job.output
        assert not job.left()
    assert sorted(answers(tmp_path / "out.jsonl")) == sorted(names)


@pytest.mark.long
def test_what_is_wrong_is_said_under_mpirun_too(checkpoint, tmp_path):
    requests(tmp_path / "in.jsonl", 2)
    (tmp_path / "out.jsonl.journal").write_text("my diary\n")
    launcher = under_mpirun(2)
    command = (str(checkpoint), *RANKS, "-o", "out.jsonl")
    with Job(tmp_path, *command, "-i", "-", command=launcher) as job:
        assert job.end() == 2, job.output
        assert job.output.count("-i - under mpirun") == 1
    with Job(tmp_path, *command, "-i", "in.jsonl", command=launcher) as job:
        assert job.end() == 2, job.output
        assert job.output.count("is no journal") == 1
        assert not job.left()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_killed_ten_times(checkpoint, tmp_path):
    """SIGKILL to everything, at random points of loading, answering and writing: nothing lost, nothing twice."""
    names = requests(tmp_path / "in.jsonl", 300, 60)
    common = (str(checkpoint), "--np", "2", *RANKS, "-i", "in.jsonl", "--max-num-seqs", "8")
    began = time.monotonic()
    with Job(tmp_path, *common, "-o", "undisturbed.jsonl") as job:
        job.until(lambda: finished(tmp_path / "undisturbed.jsonl.journal") > 0)
        loading = time.monotonic() - began
        assert job.end(120) == 0, job.output
    dice = random.Random(5)
    journal = tmp_path / "out.jsonl.journal"
    for left in range(10, 0, -1):
        with Job(tmp_path, *common, *SLOW, "-o", "out.jsonl") as job:
            start = finished(journal)  # however fast the machine, some are left for the starts to come
            goal = start + dice.randrange((len(names) - start) // (left + 2))
            end = time.monotonic() + (dice.random() * loading if dice.random() < 0.3 else 60)
            job.until(lambda goal=goal, end=end: finished(journal) >= goal or time.monotonic() >= end, 90)
            time.sleep(dice.random() * 0.02)  # a step takes some 20 ms: killed at any point of it
            assert job.process.poll() is None, job.output
            victims = job.started.look()
            # The job starts the others anew when they are killed, and goes on.
            replaced = ".text_worker", ".grammar_process"
            ends = [pid for pid, line in victims.items() if not any(name in line for name in replaced)]
            job.all_killed = dice.random() < 0.5
            kill(list(victims) if job.all_killed else [dice.choice(ends)])
            job.end()
            assert not job.left(15), job.output
    with Job(tmp_path, *common, "-o", "out.jsonl") as job:
        assert job.end(120) == 0, job.output
    said = answers(tmp_path / "out.jsonl")
    assert sorted(said) == sorted(names)
    assert said == answers(tmp_path / "undisturbed.jsonl")
    assert files(tmp_path) == {"out.jsonl", "undisturbed.jsonl"}


@pytest.mark.long
@pytest.mark.alone  # beside others, loading may take all the time that it has
@pytest.mark.timeout(400)
def test_a_deadline(checkpoint, tmp_path):
    """Started again and again with too little time: each start ends in time, and all is done in the end."""
    command = (str(checkpoint), "--np", "2", *RANKS, "-i", "in.jsonl", "-o", "out.jsonl", "--max-num-seqs", "8")
    codes: list[int] = []
    count = 500
    while 75 not in codes:  # a fast machine has time enough for the first of them
        names = requests(tmp_path / "in.jsonl", count, 60)
        (tmp_path / "out.jsonl").unlink(missing_ok=True)
        codes, count = [], 2 * count
        while not codes or codes[-1] == 75:
            with Job(tmp_path, *command, SLURM_JOB_END_TIME=str(int(time.time()) + 25)) as job:
                start = time.monotonic()
                codes.append(job.end())
                assert codes[-1] in (0, 75), job.output
                assert time.monotonic() - start < 25
                assert not job.left()
    assert sorted(answers(tmp_path / "out.jsonl")) == sorted(names)


@pytest.mark.long
def test_why_the_ranks_refuse_is_said_once(checkpoint, tmp_path):
    path = shutil.copytree(checkpoint, tmp_path / "damaged")
    state = load_file(path / "model.safetensors")
    del state["model.layers.0.mlp.up_proj.weight"]
    save_file(state, path / "model.safetensors")
    requests(tmp_path / "in.jsonl", 3)
    with Job(tmp_path, str(path), "--np", "1", *RANKS, "-i", "in.jsonl", "-o", "out.jsonl") as job:
        assert job.end() == 3, job.output
        assert job.output.count("has no tensor model.layers.0.mlp.up_proj.weight") == 1, job.output
        assert "phalanx: stopped (exit code" in job.output


@pytest.mark.long
def test_signals(checkpoint, tmp_path):
    """SIGTERM and SIGUSR1 finish what is under way; the second SIGTERM stops at once; nothing finished is lost."""
    requests(tmp_path / "in.jsonl", 400, 300)
    command = (str(checkpoint), "--np", "2", *RANKS, "-i", "in.jsonl", "-o", "out.jsonl", "--max-num-seqs", "8")
    journal = tmp_path / "out.jsonl.journal"
    for number in (signal.SIGTERM, signal.SIGUSR1):
        with Job(tmp_path, *command) as job:
            before = finished(journal)
            job.until(lambda before=before: finished(journal) > before + 3)
            job.process.send_signal(number)
            assert job.end() == 75, job.output
            assert not job.left()
    requests(tmp_path / "in.jsonl", 100, 3000)  # what is under way at the first signal is so at the second
    with Job(tmp_path, *command, "--overwrite") as job:
        job.until(lambda: " is ready on " in job.output and finished(journal) > 3)
        job.process.send_signal(signal.SIGTERM)
        job.until(lambda: "stopping, " in job.output)
        job.process.send_signal(signal.SIGTERM)
        assert job.end(8) == 130, job.output
        assert "phalanx: stopped:" in job.output
        assert not job.left()
        assert finished(journal) > 3
    with Job(tmp_path, *command) as job:  # before anything is loaded
        time.sleep(0.3)  # 0.3 s later it is starting its ranks, which takes seconds
        job.process.send_signal(signal.SIGTERM)
        assert job.end(10) in (75, -15), job.output
        assert not job.left()


@pytest.mark.long
def test_restarts(checkpoint, tmp_path):
    """A rank is lost; the supervisor starts the ranks again, and what was under way is asked again."""
    names = requests(tmp_path / "in.jsonl", 400, 60)
    command = (str(checkpoint), "--np", "2", *RANKS, "-i", "in.jsonl", "-o", "out.jsonl", "--max-num-seqs", "8",
               "--restarts", "1")  # fmt: skip
    journal = tmp_path / "out.jsonl.journal"
    with Job(tmp_path, *command) as job:
        job.until(lambda: finished(journal) > 30)
        os.kill(job.pid("-m phalanx.rank"), signal.SIGKILL)
        job.until(lambda: "starting the ranks again (0 restarts left)" in job.output)
        assert job.end() == 0, job.output
        assert "asked again when" in job.output
        assert not job.left()
    assert sorted(answers(tmp_path / "out.jsonl")) == sorted(names)


@pytest.mark.long
def test_the_jobs_process_is_killed(checkpoint, tmp_path):
    requests(tmp_path / "in.jsonl", 400, 60)
    command = (str(checkpoint), "--np", "2", *RANKS, "-i", "in.jsonl", "-o", "out.jsonl", *SLOW)
    with Job(tmp_path, *command) as job:
        job.until(lambda: finished(tmp_path / "out.jsonl.journal") > 20)
        os.kill(job.pid("-m phalanx.rank.server.batch"), signal.SIGKILL)
        assert job.end() == 70, job.output
        assert "signal 9" in job.output and "same command" in job.output
        assert not job.left()


@pytest.mark.long
@pytest.mark.timeout(800)
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_disk(checkpoint, tmp_path):
    names = requests(tmp_path / "in.jsonl", 300)
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96k", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("mount is not allowed here")
    try:
        ranks = *RANKS, "--timeout", "200"  # the last one counts: nothing hangs here, but others may have the cores
        command = (str(checkpoint), "--np", "2", *ranks, "-i", "in.jsonl", "-o", "disk/out.jsonl")
        with Job(tmp_path, *command) as job:
            assert job.end(300) == 1, job.output
            assert "space left" in job.output
            assert not job.left()
        assert finished(disk / "out.jsonl.journal") > 10
        subprocess.run(["mount", "-o", "remount,size=10m", str(disk)], check=True)
        with Job(tmp_path, *command) as job:
            assert job.end(300) == 0, job.output
        assert sorted(answers(disk / "out.jsonl")) == sorted(names)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_help_needs_nothing():
    done = subprocess.run(
        [sys.executable, "-m", "phalanx.launcher.cli", "batch", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "--deadline TIME" in done.stdout and "--port" not in done.stdout
