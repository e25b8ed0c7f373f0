"""`phalanx batch` as a user runs it: on two CPU ranks, stopped and killed in every way, and started again."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from .checkpoints import make_checkpoint
from .processes import Started, kill, wait
from .ranks import CLEAN, mpirun
from .server import PHALANX

RANKS = ("--device", "cpu", "--mem", "64", "--timeout", "20")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("batch") / "tiny", max_position_embeddings=4096)


class Job:
    """A started `phalanx batch` of which nothing may be left."""

    def __init__(self, place: Path, *arguments: str, command=(), stdin=None, **env: str):
        environ = {k: v for k, v in os.environ.items() if not k.startswith((*CLEAN, "PHALANX_"))}
        environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", **env}
        self.runtime = Path(tempfile.mkdtemp(prefix="run-", dir="/tmp"))
        (self.runtime / "t").mkdir()  # a mpirun that was killed leaves its own directory there
        environ |= {"XDG_RUNTIME_DIR": str(self.runtime), "TMPDIR": str(self.runtime / "t")}
        self.all_killed = False  # then nobody can remove the job's directory
        self.log = place / "log"
        self._file = open(self.log, "wb")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*command, PHALANX, "batch", *arguments], cwd=place, env=environ, stdin=stdin or subprocess.DEVNULL,
            stdout=self._file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self.started = Started(self.process.pid)

    @property
    def output(self) -> str:
        return self.log.read_text()

    def until(self, condition, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline and self.process.poll() is None, self.output
            time.sleep(0.02)
        self.started.look()

    def end(self, seconds: float = 60) -> int:
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.output
            self.started.look()
            time.sleep(0.02)
        return self.process.returncode

    def left(self, seconds: float = 10) -> list[str]:
        """What still runs of all that was started, and what is left of its directory."""
        return wait(self._rest, seconds)

    def _rest(self) -> list[str]:
        found = list(self.started.living().values())
        return found if self.all_killed else found + [name for name in os.listdir(self.runtime) if name != "t"]

    def pid(self, kind: str) -> int:
        return next(pid for pid, line in self.started.look().items() if line.endswith(kind))

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.started.kill()
        self.process.wait()
        self._file.close()
        shutil.rmtree(self.runtime)


def requests(path: Path, count: int, tokens: int = 30) -> list[str]:
    """Greedy requests of both kinds, of different lengths."""
    names = [f"r{i}" for i in range(count)]
    with open(path, "w") as file:
        for i, name in enumerate(names):
            url, body = "/v1/completions", {"prompt": f"the quick {i}", "ignore_eos": True}
            if i % 3 == 0:
                url, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": f"say {i}"}]}
            body |= {"max_tokens": tokens // 2 + i % tokens, "temperature": 0}
            file.write(json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body}) + "\n")
    return names


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def answers(path: Path) -> dict[str, object]:
    """What was said, by custom_id; each is there once."""
    found = read(path)
    said = {one["custom_id"]: (one["response"]["body"]["choices"], one["response"]["body"]["usage"]["total_tokens"])
            for one in found}  # fmt: skip
    assert len(said) == len(found), "a custom_id is there twice"
    return said


def finished(path: Path) -> int:
    """Whole lines in the journal, without its header."""
    return max(0, path.read_bytes().count(b"\n") - 1) if path.exists() else 0


def files(place: Path) -> set[str]:
    return {path.name for path in place.iterdir()} - {"in.jsonl", "log"}


def test_a_file_of_requests(checkpoint, tmp_path):
    """Two ranks under the supervisor; stopped with Ctrl-C, started again, and a third time for nothing."""
    names = requests(tmp_path / "in.jsonl", 240, 60)
    with open(tmp_path / "in.jsonl", "a") as file:
        file.write("nonsense\n")
    command = (str(checkpoint), "--np", "2", *RANKS, "-i", "in.jsonl", "-o", "out.jsonl", "--max-num-seqs", "8",
               "--ordered", "--summary", "sum.json")  # fmt: skip
    journal = tmp_path / "out.jsonl.journal"
    with Job(tmp_path, *command) as job:
        job.until(lambda: finished(journal) > 20)
        job.process.send_signal(signal.SIGINT)
        assert job.end() == 75, job.output
        assert "stopping, asked to by a signal: " in job.output and "the same command goes on there" in job.output
        assert not job.left()
    done = finished(journal)
    assert 20 < done < 240 and files(tmp_path) == {"out.jsonl.journal", "sum.json"}
    with Job(tmp_path, *command) as job:
        assert job.end() == 0, job.output
        assert f"going on after {done} finished requests" in job.output
        assert not job.left()
    assert list(answers(tmp_path / "out.jsonl")) == names
    assert [(one["line"], one["error"]["code"]) for one in read(tmp_path / "out.errors.jsonl")] == [
        (241, "invalid_json")
    ]
    assert files(tmp_path) == {"out.jsonl", "out.errors.jsonl", "sum.json"}
    told = json.loads((tmp_path / "sum.json").read_text())
    assert told["total"] == {**told["total"], "requests": 241, "answered": 240, "failed": 1}
    assert told["run"]["requests"] == 241 - done and told["energy_joules"] is None
    with Job(tmp_path, *command) as job:
        assert job.end() == 0
        assert f"phalanx: {tmp_path}/out.jsonl has every answer already: nothing to do\n" == job.output


def test_under_a_users_own_mpirun(checkpoint, tmp_path):
    """No supervisor: the ranks end with the job's code."""
    names = requests(tmp_path / "in.jsonl", 240, 60)
    launcher = (mpirun(), "-np", "2", "--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE")
    command = (str(checkpoint), *RANKS, "-i", "in.jsonl", "-o", "out.jsonl", "--max-num-seqs", "8")
    with Job(tmp_path, *command, command=launcher) as job:
        job.until(lambda: finished(tmp_path / "out.jsonl.journal") > 5)
        job.process.send_signal(signal.SIGUSR1)
        assert job.end() == 75, job.output
        assert "phalanx: unfinished: asked to by a signal" in job.output
        assert not job.left()
    with Job(tmp_path, *command, command=launcher) as job:
        assert job.end() == 0, job.output
        assert not job.left()
    assert sorted(answers(tmp_path / "out.jsonl")) == sorted(names)


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


def test_what_is_wrong_is_said_under_mpirun_too(checkpoint, tmp_path):
    requests(tmp_path / "in.jsonl", 2)
    (tmp_path / "out.jsonl.journal").write_text("my diary\n")
    launcher = (mpirun(), "-np", "2", "--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE")
    command = (str(checkpoint), *RANKS, "-o", "out.jsonl")
    with Job(tmp_path, *command, "-i", "-", command=launcher) as job:
        assert job.end() == 2, job.output
        assert job.output.count("-i - under mpirun: MPI hands no standard input on that can be relied on; write") == 1
    with Job(tmp_path, *command, "-i", "in.jsonl", command=launcher) as job:
        assert job.end() == 2, job.output
        assert job.output.count("is no journal of `phalanx batch`: remove it, or choose another -o") == 1
        assert not job.left()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_killed_ten_times(checkpoint, tmp_path):
    """SIGKILL to everything, at random points of loading, answering and writing: nothing lost, nothing twice."""
    names = requests(tmp_path / "in.jsonl", 600, 60)
    common = (str(checkpoint), "--np", "2", *RANKS, "-i", "in.jsonl", "--max-num-seqs", "8")
    with Job(tmp_path, *common, "-o", "undisturbed.jsonl") as job:
        assert job.end(120) == 0, job.output
    dice = random.Random(5)
    journal = tmp_path / "out.jsonl.journal"
    killed = 0
    while killed < 10:
        with Job(tmp_path, *common, "-o", "out.jsonl") as job:
            start, goal = finished(journal), dice.randrange(0, 60)
            with contextlib.suppress(AssertionError):
                job.until(lambda start=start, goal=goal: finished(journal) >= start + goal)
            time.sleep(dice.random() * 0.3)
            if job.process.poll() is not None:
                break  # it had come to its end
            victims = list(job.started.look())
            job.all_killed = dice.random() < 0.5
            kill(victims if job.all_killed else [dice.choice(victims)])
            killed += 1
            job.end()
            assert not job.left(15), job.output
    assert killed == 10
    with Job(tmp_path, *common, "-o", "out.jsonl") as job:
        assert job.end(120) == 0, job.output
    said = answers(tmp_path / "out.jsonl")
    assert sorted(said) == sorted(names)
    assert said == answers(tmp_path / "undisturbed.jsonl")
    assert files(tmp_path) == {"out.jsonl", "undisturbed.jsonl"}


@pytest.mark.long
def test_a_deadline(checkpoint, tmp_path):
    """Started again and again with too little time: each start ends in time, and all is done in the end."""
    names = requests(tmp_path / "in.jsonl", 1500, 60)
    command = (str(checkpoint), "--np", "2", *RANKS, "-i", "in.jsonl", "-o", "out.jsonl", "--max-num-seqs", "8")
    codes: list[int] = []
    while not codes or codes[-1] == 75:
        with Job(tmp_path, *command, SLURM_JOB_END_TIME=str(int(time.time()) + 25)) as job:
            start = time.monotonic()
            codes.append(job.end())
            assert codes[-1] in (0, 75), job.output
            assert time.monotonic() - start < 25
            assert not job.left()
    assert codes[-1] == 0 and len(codes) > 1, codes
    assert sorted(answers(tmp_path / "out.jsonl")) == sorted(names)


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
    with Job(tmp_path, *command) as job:
        before = finished(journal)
        job.until(lambda: finished(journal) > before + 3)
        job.process.send_signal(signal.SIGTERM)
        job.until(lambda: "stopping, " in job.output)
        job.process.send_signal(signal.SIGTERM)
        assert job.end(8) == 130, job.output
        assert "phalanx: stopped: " in job.output
        assert not job.left()
        assert finished(journal) > before + 3
    with Job(tmp_path, *command) as job:  # before anything is loaded
        time.sleep(0.3)
        job.process.send_signal(signal.SIGTERM)
        assert job.end(10) in (75, -15), job.output
        assert not job.left()


@pytest.mark.long
def test_restarts(checkpoint, tmp_path):
    """A rank is lost; the supervisor starts the ranks again, and what was under way is asked again."""
    names = requests(tmp_path / "in.jsonl", 400, 60)
    command = (str(checkpoint), "--np", "2", *RANKS, "-i", "in.jsonl", "-o", "out.jsonl", "--max-num-seqs", "8",
               "--restarts", "2")  # fmt: skip
    with Job(tmp_path, *command) as job:
        for goal in (30, 100):
            job.until(lambda goal=goal: finished(tmp_path / "out.jsonl.journal") > goal)
            os.kill(job.pid("-m phalanx.rank"), signal.SIGKILL)
        assert job.end() == 0, job.output
        assert "requests are asked again when they are back" in job.output
        assert "starting the ranks again (0 restarts left)" in job.output
        assert not job.left()
    assert sorted(answers(tmp_path / "out.jsonl")) == sorted(names)


@pytest.mark.long
def test_the_jobs_process_is_killed(checkpoint, tmp_path):
    requests(tmp_path / "in.jsonl", 400, 60)
    command = (str(checkpoint), "--np", "2", *RANKS, "-i", "in.jsonl", "-o", "out.jsonl", "--max-num-seqs", "8")
    with Job(tmp_path, *command) as job:
        job.until(lambda: finished(tmp_path / "out.jsonl.journal") > 20)
        os.kill(job.pid("-m phalanx.rank.front.jobs"), signal.SIGKILL)
        assert job.end() == 70, job.output
        assert "the jobs process was killed by signal 9; the same command goes on where it was" in job.output
        assert not job.left()


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_disk(checkpoint, tmp_path):
    names = requests(tmp_path / "in.jsonl", 300)
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96k", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("mount is not allowed here")
    try:
        command = (str(checkpoint), "--np", "2", *RANKS, "-i", "in.jsonl", "-o", "disk/out.jsonl")
        with Job(tmp_path, *command) as job:
            assert job.end() == 1, job.output
            assert "out.jsonl.journal: No space left on device; what was finished before is in it" in job.output
            assert not job.left()
        assert finished(disk / "out.jsonl.journal") > 10
        subprocess.run(["mount", "-o", "remount,size=10m", str(disk)], check=True)
        with Job(tmp_path, *command) as job:
            assert job.end() == 0, job.output
        assert sorted(answers(disk / "out.jsonl")) == sorted(names)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_help_needs_nothing():
    done = subprocess.run(
        [sys.executable, "-m", "phalanx.launcher.cli", "batch", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "--deadline TIME" in done.stdout and "--port" not in done.stdout
