"""The mpirun of the MPI that mpi4py loads, and what it is told."""

import os
import re
import subprocess
import sys

import pytest
from phalanx.errors import FatalError
from phalanx.launcher.job import mpirun
from phalanx.launcher.job.mpirun import Mpi

OPENMPI5 = Mpi("openmpi", "5.0.11", "/e/lib/libmpi.so.40", "/e/bin/mpirun")
OPENMPI4 = Mpi("openmpi", "4.1.8", "/e/lib/libmpi.so.40", "/e/bin/mpirun")
MPICH = Mpi("mpich", "4.3", "/e/lib/libmpi.so.12", "/e/bin/mpirun")


def test_this_environments_mpi():
    mpi = mpirun.find(os.environ)
    assert os.access(mpi.mpirun, os.X_OK)
    assert mpi.major >= 3
    assert mpi.version in str(mpi) and mpi.mpirun in str(mpi)


@pytest.mark.parametrize("folder", ["/usr/lib/x86_64-linux-gnu", "/home/a user/my  models/.venv/lib"])
def test_the_library_is_found_in_the_list_of_what_is_mapped(folder):
    """Folders may have blanks; mpi4py's own module, and what Open MPI brings along, have other names."""
    names = ("libopen-pal.so.80", "mpi4py/MPI.mpich.cpython-311-x86_64-linux-gnu.so", "libmpi.so.40.40.8", "libm.so.6")
    maps = "7ffd5b000000-7ffd5b021000 rw-p 00000000 00:00 0\n" + "".join(
        f"7f0c1a517000-7f0c1a51b000 r-xp 00012000 fe:00 260386                     {folder}/{name}\n" for name in names
    )
    found = re.search(mpirun._LIBRARY, maps, re.M)
    assert found and found[1] == f"{folder}/libmpi.so.40.40.8"


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A library that mpi4py says it loads, and programs that say what they are."""

    def make(library="Open MPI v5.0.11, package: x", programs=None, code=0):
        prefix = tmp_path / "prefix"
        (prefix / "lib").mkdir(parents=True)
        (prefix / "bin").mkdir()
        (tmp_path / "path").mkdir()
        for name, text in (programs or {}).items():
            program = tmp_path / name
            program.write_text(f"#!/bin/sh\ncat <<'X'\n{text}\nX\n")
            program.chmod(0o755)
        run = subprocess.run

        def probe(command, **more):
            if command[0] != sys.executable:
                return run(command, **more)
            out = f"{prefix}/lib/libmpi.so.40\n{library}\n"
            return subprocess.CompletedProcess(command, code, out, "Traceback\nRuntimeError: cannot load MPI library")

        monkeypatch.setattr(mpirun.subprocess, "run", probe)
        return mpirun.find({"PATH": str(tmp_path / "path")})

    return make


def test_the_one_beside_the_library_is_taken(fake, tmp_path):
    texts = {"prefix/bin/mpirun": "mpirun (Open MPI) 5.0.11", "path/mpirun": "mpirun (Open MPI) 5.0.3"}
    assert fake(programs=texts).mpirun == str(tmp_path / "prefix/bin/mpirun")


def test_the_one_on_the_path_is_taken_where_it_fits(fake, tmp_path):
    assert fake(programs={"path/mpirun": "mpirun (Open MPI) 5.0.3"}).mpirun == str(tmp_path / "path/mpirun")


def test_mpichs(fake, tmp_path):
    texts = {"path/mpiexec": "HYDRA build details:\n    Version:        4.1\n"}
    found = fake("MPICH Version:      4.3.0\nMPICH Release date: x", texts)
    assert (found.kind, found.version, found.mpirun) == ("mpich", "4.3.0", str(tmp_path / "path/mpiexec"))


def test_another_mpis_mpirun_is_refused(fake, tmp_path):
    with pytest.raises(FatalError) as stop:
        fake(programs={"path/mpirun": "mpirun (Open MPI) 4.1.6"})
    assert stop.value.code == 2
    assert re.search(f"5.0.11.*{tmp_path}/path/mpirun.*4.1.6.*MPI4PY_LIBMPI", str(stop.value))


def test_no_library(fake):
    with pytest.raises(FatalError) as stop:
        fake(code=1)
    assert "loaded (RuntimeError: cannot load" in str(stop.value)


def test_an_unknown_library(fake):
    words = r"libmpi.so.40 is neither Open MPI nor MPICH: 'Other MPI 1'; start the ranks with its own mpirun \(mpirun"
    with pytest.raises(FatalError, match=words):
        fake("Other MPI 1")


def test_lines():
    line = mpirun.command(OPENMPI5, 3, ["python", "x"])
    assert line == ["/e/bin/mpirun", "-np", "3", "--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE", "python", "x"]
    assert mpirun.command(MPICH, 2, ["x"]) == ["/e/bin/mpirun", "-np", "2", "-iface", "lo", "x"]


def test_what_mpirun_needs(monkeypatch):
    monkeypatch.setattr(mpirun.os, "geteuid", lambda: 0)
    few, many = 1, len(os.sched_getaffinity(0)) + 1
    environ = mpirun.environment(OPENMPI5, few, {})
    assert environ == {
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,sm",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    older = mpirun.environment(OPENMPI4, few, {})
    assert (older["OMPI_MCA_btl"], older["OMPI_MCA_plm"]) == ("self,vader", "isolated")
    assert mpirun.environment(OPENMPI5, many, {})["OMPI_MCA_mpi_yield_when_idle"] == "1"
    assert "OMPI_MCA_btl" not in mpirun.environment(OPENMPI5, few, {"OMPI_MCA_btl": "self,tcp"})
    assert mpirun.environment(MPICH, many, {}) == {"FI_TCP_IFACE": "lo"}
    monkeypatch.setattr(mpirun.os, "geteuid", lambda: 1000)
    assert "OMPI_ALLOW_RUN_AS_ROOT" not in mpirun.environment(OPENMPI5, few, {})
