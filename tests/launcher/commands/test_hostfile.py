"""`phalanx hostfile`, and that mpirun reads what it writes."""

import os
import re
import subprocess
from pathlib import Path

import phalanx
import pytest
from phalanx.errors import FatalError
from phalanx.launcher import cli
from phalanx.launcher.commands import hostfile
from phalanx.launcher.job import mpirun

EXAMPLES = Path(phalanx.__file__).resolve().parent / "hostfiles"
BATCH = ("SLURM_", "PBS_", "LSB_")


@pytest.fixture(autouse=True)
def no_allocation(monkeypatch):
    for name in os.environ:
        if name.startswith(BATCH):
            monkeypatch.delenv(name)


@pytest.fixture
def allocated(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[08-09]")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2,1")
    monkeypatch.setenv("SLURM_JOB_ID", "12")


def test_to_the_terminal(allocated, capsys):
    assert cli.main(["hostfile", "--mpi", "openmpi"]) == 0
    out, err = capsys.readouterr()
    source = "SLURM_JOB_NODELIST and SLURM_TASKS_PER_NODE"
    head, *hosts = out.splitlines()
    assert re.match("# 2 hosts,.* 12", head) and head.endswith(source)
    assert hosts == ["gpu08 slots=2", "gpu09 slots=1"]
    assert err == ""


def test_a_variable_that_is_no_option_is_told(allocated, capsys, monkeypatch):
    monkeypatch.setenv("PHALANX_SLOT", "8")
    assert cli.main(["hostfile", "--mpi", "openmpi"]) == 0
    told = "phalanx: the environment variable PHALANX_SLOT is no option; did you mean PHALANX_SLOTS?\n"
    assert capsys.readouterr().err == told


def test_to_a_file(allocated, tmp_path, capsys):
    path = tmp_path / "hosts"
    assert cli.main(["hostfile", "--slots", "8", "--mpi", "mpich", "-o", str(path)]) == 0
    assert path.read_text().splitlines()[1:] == ["gpu08:8", "gpu09:8"]
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{path} phalanx serve" in err
    assert cli.main(["hostfile", "--slots", "8", "--mpi", "openmpi", "-o", str(path)]) == 0
    assert f"-hostfile {path} --bind-to none" in capsys.readouterr().err


def test_a_file_that_cannot_be_written(allocated, capsys):
    assert cli.main(["hostfile", "--mpi", "mpich", "-o", "/nowhere/hosts"]) == 2
    assert "phalanx: --output /nowhere/hosts:" in capsys.readouterr().err


def test_slots_that_leave_gpus_idle_are_told(allocated, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    hint = "phalanx: this node has 4 GPUs, but slots differ from that; --slots 4 gives each GPU a rank\n"
    assert cli.main(["hostfile", "--mpi", "openmpi"]) == 0
    assert capsys.readouterr().err == hint
    assert cli.main(["hostfile", "--mpi", "openmpi", "--slots", "4"]) == 0
    assert capsys.readouterr().err == ""


def test_without_an_mpi(allocated, monkeypatch, capsys):
    def nothing(_):
        raise FatalError("no mpirun", 2)

    monkeypatch.setattr(hostfile.mpirun, "find", nothing)
    assert cli.main(["hostfile"]) == 0
    out, err = capsys.readouterr()
    assert "gpu08 slots=2" in out
    assert "--mpi mpich writes MPICH's" in err


def test_outside_an_allocation(capsys):
    assert cli.main(["hostfile"]) == 2
    assert "allocation: neither SLURM_JOB_NODELIST (Slurm)" in capsys.readouterr().err


def test_mpirun_reads_it(tmp_path, monkeypatch):
    """On this host, named as a batch system would."""
    monkeypatch.setenv("LSB_MCPU_HOSTS", "localhost 2")
    path = tmp_path / "hosts"
    assert cli.main(["hostfile", "-o", str(path)]) == 0
    mpi = mpirun.find(os.environ)
    line = hostfile.start_line(mpi.kind, 2, str(path)).split()
    done = subprocess.run(
        [mpi.mpirun, *line[1:], "echo", "here"],
        env=os.environ | mpirun.environment(mpi, 2, os.environ),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "here\nhere\n"), done.stderr


@pytest.mark.parametrize("name", ["pbs.sh", "lsf.sh"])
def test_the_examples_are_shell(name):
    assert subprocess.run(["bash", "-n", str(EXAMPLES / name)]).returncode == 0
    text = (EXAMPLES / name).read_text()
    line = next(line for line in text.splitlines() if line.startswith("phalanx hostfile"))
    assert "hostfile --slots 8 --mpi" in line


@pytest.mark.parametrize("name", ["pbs.sh", "lsf.sh"])
def test_the_examples_run(name, tmp_path, monkeypatch):
    """With a fake mpirun that is drained by the example's own means, and whose exit code becomes the job's."""
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "mpirun").write_text(
        f'#!/bin/sh\necho "$@" >{tmp_path}/line\ncat phalanx-hosts-* >{tmp_path}/hosts\nexit 71\n'
    )
    phalanx_command = f'#!/bin/sh\nexec "{os.sys.executable}" -m phalanx.launcher.cli "$@"\n'
    (fake / "phalanx").write_text(phalanx_command)
    for program in fake.iterdir():
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake}:{os.environ['PATH']}")
    monkeypatch.setenv("PBS_O_WORKDIR", str(tmp_path))
    monkeypatch.setenv("PBS_JOBID", "3")
    monkeypatch.setenv("LSB_JOBID", "3")
    (tmp_path / "nodes").write_text("a\na\nb\nb\n")
    monkeypatch.setenv("PBS_NODEFILE" if name == "pbs.sh" else "LSB_DJOB_HOSTFILE", str(tmp_path / "nodes"))
    monkeypatch.setenv("MODEL", "/models/one")
    done = subprocess.run(["bash", str(EXAMPLES / name)], cwd=tmp_path, timeout=60)
    assert done.returncode == 71
    assert (tmp_path / "hosts").read_text().splitlines()[1:] == ["a slots=8", "b slots=8"]
    assert "-np 16 -hostfile phalanx-hosts-3" in (tmp_path / "line").read_text()
    assert not list(tmp_path.glob("phalanx-hosts-*"))
