"""The device of the tests' ranks: on the machine's GPUs, on CPUs where those are too few or TEST_DEVICE says so."""

import pytest
import torch
from phalanx.launcher.job import mpi_env

from . import engine


@pytest.fixture
def device(monkeypatch):
    """engine.device on a machine of so many GPUs."""

    def on(gpus, ranks, threads=False, asked="", usable=True):
        monkeypatch.setattr(mpi_env, "gpus", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
        monkeypatch.delenv("TEST_DEVICE", raising=False)
        if asked:
            monkeypatch.setenv("TEST_DEVICE", asked)
        engine.usual.cache_clear()
        return engine.device(ranks, threads)

    yield on
    engine.usual.cache_clear()


def test_gpus_are_found(device):
    assert [device(2, ranks) for ranks in (1, 2, 3)] == ["cuda", "cuda", "cpu"]
    assert device(2, 2, threads=True) == device(2, 1, usable=False) == "cpu"


def test_torch_is_not_asked_where_no_gpu_is_seen(device, monkeypatch):
    device(0, 1)
    engine.usual.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("PyTorch was asked"))
    assert engine.device(1) == "cpu"


def test_what_was_asked_for_is_what_runs_or_nothing(device):
    assert device(4, 1, asked="cpu") == "cpu"
    assert device(4, 4, asked="cuda") == "cuda"
    for ranks, threads, why in ((5, False, "needs 5 GPUs, there are 4"), (1, True, "ranks as threads are for CPUs")):
        with pytest.raises(pytest.skip.Exception, match=why):
            device(4, ranks, threads, asked="cuda")
