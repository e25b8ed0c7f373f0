"""Run a script's function on MPI ranks, with a time limit and nothing left behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from .processes import Started

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
CLEAN = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "PHALANX_")
MEMORY = "OMPI_MCA_btl_sm_backing_directory"  # set by leftovers.py
_QUICK = """
import gc, os, runpy, sys
gc.set_threshold(1_000_000)
del sys.argv[0]
del sys.path[0]
sys.path.append(os.path.dirname(sys.argv[0]))  # last, as a folder of tests may have a library's name
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def quick(script: Path | str) -> tuple[str, ...]:
    """Python's arguments for a script with a rank's imports. They make no garbage, and looking for it would take a
    quarter of their time."""
    return "-c", _QUICK, str(script)


def mpirun() -> str:
    """The one that belongs to the MPI which mpi4py loads."""
    chosen = os.environ.get("MPI4PY_LIBMPI")  # set by tests/launcher/job/test_other_mpi.py
    beside = Path(chosen).parents[1] / "bin" / "mpirun" if chosen else Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    assert found  # no mpirun: run `make install`
    return found


def under_mpirun(ranks: int) -> list[str]:
    """The words that a user puts before a program, on a machine of few cores."""
    return [mpirun(), "-np", str(ranks), "--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE"]


def clean() -> dict[str, str]:
    """Our environment without another job's variables."""
    return {name: value for name, value in os.environ.items() if name == MEMORY or not name.startswith(CLEAN)}


def environment(**more: str) -> dict[str, str]:
    """The words with what root and few cores need."""
    return clean() | {
        **AS_ROOT,
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_plm": "^slurm,rsh",  # one host: Open MPI 4 would look for ssh
        "OMP_NUM_THREADS": "1",
        **more,
    }


def run_ranks(
    size: int, script: Path | str, *arguments: str, timeout: float = 60, threads: bool = False, **env: str
) -> subprocess.CompletedProcess:
    """mpirun of `python script arguments`, or the script alone whose threads are the ranks; its output as text. Kills
    the whole group when the time is up."""
    command = [] if threads else under_mpirun(size)
    process = subprocess.Popen(
        [*command, sys.executable, *quick(script), *arguments],
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        Started(process.pid).kill()
        out, err = process.communicate()
        raise AssertionError(f"not done in {timeout} s:\n{out}\n{err}") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)
