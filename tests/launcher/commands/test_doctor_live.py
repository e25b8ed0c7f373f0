"""`phalanx doctor` with ranks: its own, a user's, and such as do not come."""

import json
import subprocess
import sys
import time

import pytest
from phalanx.errors import FatalError
from phalanx.launcher import cli
from phalanx.launcher.commands.doctor import command
from phalanx.launcher.commands.doctor.check import OK
from phalanx.launcher.job.mpirun import Mpi

from ... import retries
from ...fields import each
from ...ranks import environment, run_ranks

pytestmark = [pytest.mark.alone, retries.CLOCKS]
DOCTOR = [sys.executable, "-m", "phalanx.launcher.cli", "doctor"]


def by_name(report):
    found = {}
    for one in report["checks"]:
        found.setdefault(one["name"], []).append(one)
    return found


@pytest.mark.long
def test_two_ranks_of_its_own(tmp_path):
    started = time.monotonic()
    done = subprocess.run(
        [*DOCTOR, "--json", "--device", "cpu"],
        env=environment(XDG_CACHE_HOME=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert time.monotonic() - started < 60
    report = json.loads(done.stdout)
    found = by_name(report)
    assert list(found) == [
        "python", "packages", "mpi", "ranks", "host", "device", "numa", "binding", "links", "network", "clock",
        "memory", "port", "disk", "compiler", "cpu",
    ]  # fmt: skip
    assert all(one["advice"] for one in report["checks"] if one["state"] != OK)
    assert found["ranks"][0]["text"].startswith("2 met on 1 host in ")
    assert done.returncode == (1 if report["state"] == "FAIL" else 0)
    rates = report["ranks"]["all_reduce"]
    sizes = [16 << 10, 1 << 20, 64 << 20]
    assert each(rates, "bytes") in (sizes, sizes[:2])  # a busy machine leaves no time for the largest
    assert all(rate["us"] > 0 and rate["gbps"] > 0 for rate in rates)
    saved = json.loads((tmp_path / "phalanx/cpu-speed.json").read_text())
    assert saved["gflops"] > 1 and saved["gbps"] > 0.5 and saved["all_reduce_us"] == rates[0]["us"]
    assert str(tmp_path / "phalanx/cpu-speed.json") in found["cpu"][0]["text"]


@pytest.mark.long
def test_a_users_own_ranks(tmp_path):
    script = tmp_path / "doctor.py"
    script.write_text("import sys; from phalanx.launcher import cli; sys.exit(cli.main(['doctor', *sys.argv[1:]]))")
    done = run_ranks(3, script, "--no-speeds", "--device", "cpu", TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any("ranks        3 met" in line for line in lines)
    assert any("started by mpirun" in line for line in lines)
    assert sum(line[6:].startswith(("python", "port")) for line in lines) == 2  # said once
    assert lines[-1].endswith(" FAIL")
    assert not list(tmp_path.glob("phalanx-doctor-*"))


@pytest.fixture
def report(capsys):
    """The exit code and the lines of a run in this process, without its seconds of measuring."""

    def run(*argv):
        code = cli.main(["doctor", "--no-speeds", *argv])
        return code, capsys.readouterr().out.splitlines()

    return run


def fake_mpirun(monkeypatch, tmp_path, text):
    program = tmp_path / "mpirun"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    monkeypatch.setattr(command.mpirun, "find", lambda _: Mpi("openmpi", "5.0", "/lib", str(program)))
    return program


def test_an_mpirun_that_fails(monkeypatch, tmp_path, report):
    program = fake_mpirun(monkeypatch, tmp_path, "echo ------ >&2; echo no daemon could be started >&2; exit 3")
    code, lines = report()
    assert code == 1
    (said,) = [line for line in lines if line.startswith("FAIL  ranks ")]
    assert "code 3: no daemon" in said and f"{program} -np 2" in said
    assert [line for line in lines if line.startswith("OK    mpi ") and f"5.0 ({program})" in line]
    assert any(line.startswith("OK    host ") for line in lines)  # what one process sees is told all the same


def test_an_mpirun_that_says_nothing(monkeypatch, tmp_path, report):
    program = fake_mpirun(monkeypatch, tmp_path, "exit 0")
    code, lines = report("--np", "4")
    assert code == 1
    assert [line for line in lines if line.startswith("FAIL  ranks ") and f"{program} -np 4" in line]


def test_an_mpirun_that_hangs(monkeypatch, tmp_path, report):
    monkeypatch.setattr(command, "MARGIN", 0.0)
    fake_mpirun(monkeypatch, tmp_path, "exec sleep 100")
    code, lines = report("--timeout", "1")
    assert code == 1
    assert [line for line in lines if line.startswith("FAIL  ranks ") and "within 1 s" in line]


def test_no_mpi(monkeypatch, report):
    def nothing(_):
        raise FatalError("several ranks need an MPI library, and none can be loaded", 2)

    monkeypatch.setattr(command.mpirun, "find", nothing)
    code, lines = report()
    assert code == 1
    assert [line for line in lines if line.startswith("FAIL  mpi ") and "several ranks" in line]


@pytest.mark.long
def test_ranks_that_do_not_meet(tmp_path):
    """One rank never joins: rank 0 says so when the time is up, and nothing hangs."""
    script = tmp_path / "doctor.py"
    script.write_text(
        "import os, sys, time; from phalanx.launcher import cli\n"
        "if os.environ.get('OMPI_COMM_WORLD_RANK') == '1': time.sleep(40)\n"
        "sys.exit(cli.main(['doctor', *sys.argv[1:]]))"
    )
    done = run_ranks(2, script, "--no-speeds", "--device", "cpu", "--timeout", "3")
    assert done.returncode != 0
    assert [line for line in done.stdout.splitlines() if line.startswith("FAIL  ranks ") and "within 3 s" in line]


@pytest.mark.long
def test_a_device_that_is_not_there(report):
    code, lines = report("--np", "1", "--device", "cuda", "--d", "99")
    assert code == 1
    assert any("--d and --device" in line for line in lines)
    assert [line for line in lines if line.startswith("OK    links ") and "one rank" in line]


def test_rank_0_left_no_word(monkeypatch, report):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    monkeypatch.setattr(command.linux, "die_with", lambda _: None)
    monkeypatch.setattr(command.ranks_member, "run", lambda *_: None)
    code, lines = report()
    assert code == 1
    assert [line for line in lines if line.startswith("FAIL  ranks ") and "rank 0" in line]


def test_help_and_choices(capsys, monkeypatch):
    assert cli.main(["doctor", "--help"]) == 0
    assert "phalanx doctor [DIR] [options]" in capsys.readouterr().out
    assert cli.main(["doctor", "--np", "x"]) == 2
    assert "phalanx: --np 'x' (command" in capsys.readouterr().err
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert cli.main(["doctor"]) == 2
    assert "started 2 tasks without" in capsys.readouterr().err
