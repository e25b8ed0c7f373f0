import re

import pytest
from phalanx.comm import broadcast, threads

from ..ranks import run_ranks
from . import battery


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_threads(size):
    threads.run(lambda comm: battery.all_of_it(comm, broadcast.ThreadPlanBroadcast(comm)), size)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_mpi(size):
    done = run_ranks(size, battery.__file__, str(size))
    assert done.returncode == 0, done.stderr
    # mpirun of Open MPI 4 may write one rank's end of line after another one's line.
    said = sorted(re.findall("passed . of .", done.stdout))
    assert said == [f"passed {r} of {size}" for r in range(size)]


def test_a_failing_thread_frees_the_others_and_its_error_is_the_one_raised():
    def one(comm):
        if comm.rank == 1:
            raise KeyError("mine")
        comm.barrier()

    with pytest.raises(KeyError, match="mine"):
        threads.run(one, 3)


def test_a_failing_thread_frees_one_that_waits_for_its_message():
    import torch

    def one(comm):
        if comm.rank == 1:
            raise KeyError("mine")
        comm.recv(torch.empty(1), 1)

    with pytest.raises(KeyError, match="mine"):
        threads.run(one, 2)


def test_an_mpirun_that_does_not_belong_to_mpi4py_is_noticed():
    """Announced 4, MPI sees 1: as with srun without PMI."""
    done = run_ranks(1, battery.__file__, "4")
    assert done.returncode != 0
    assert "MPI sees 1" in done.stderr
    assert "MPI4PY_LIBMPI" in done.stderr
