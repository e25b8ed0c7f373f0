"""Messages about an MPI that will not do. The backend itself is tried on ranks, in test_backends.py."""

from types import SimpleNamespace

import pytest
import torch
from phalanx.comm import mpi


@pytest.fixture
def library(monkeypatch):
    """An MPI of this thread level, whose world has two ranks."""

    def make(level):
        fake = SimpleNamespace(COMM_WORLD=SimpleNamespace(Get_size=lambda: 2), THREAD_MULTIPLE=3)
        monkeypatch.setattr(mpi, "MPI", fake)
        monkeypatch.setattr(mpi, "library", lambda: "Some MPI 1.0")
        monkeypatch.setattr(mpi, "_initialise", lambda: level)

    return make


def test_an_mpi_without_threads(library):
    library(1)
    with pytest.raises(RuntimeError) as error:
        mpi.join(2)
    assert "1, Phalanx needs MPI_THREAD_MULTIPLE" in str(error.value)


def test_a_tensor_that_mpi_cannot_see():
    with pytest.raises(ValueError, match="contiguous"):
        mpi._buffer(torch.zeros(3, 2).t())
