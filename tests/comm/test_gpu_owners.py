"""Ranks that were shown the same GPU, and those that have one each as their first."""

import ctypes
import threading
from uuid import UUID

import pytest
import torch
from phalanx.comm import gpu_owners, threads
from phalanx.errors import USAGE, FatalError

CUDA = torch.device("cuda", 0)
HOSTS = ["a", "a", "b", "b"]


def meet(monkeypatch, *gpus):
    """Messages of ranks whose devices have these names."""
    mine = threading.local()
    monkeypatch.setattr(gpu_owners, "uuid", lambda device: mine.uuid)

    def one(world):
        mine.uuid = gpus[world.rank]
        gpu_owners.check(world, HOSTS, CUDA)

    threads.run(one, len(gpus))


def test_a_gpu_each(monkeypatch):
    meet(monkeypatch, "u0", "u1", "u2", "u3")
    meet(monkeypatch, "", "", "", "")  # on CPUs, or where the driver does not tell


@pytest.mark.parametrize("value", ["3", None])
def test_ranks_that_share_one(monkeypatch, value):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if value:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    with pytest.raises(FatalError) as stop:
        meet(monkeypatch, "u0", "u1", "u2", "u2")
    assert stop.value.code == USAGE
    shown = "'3'" if value else "not set"
    assert f"(CUDA_VISIBLE_DEVICES is {shown})" in str(stop.value)
    assert "--gpus-per-task=1" in str(stop.value)


def test_the_drivers_name(monkeypatch):
    """The name of the second device that the process sees."""

    def call(name, out, value):
        if name == "cuDeviceGet":
            out._obj.value = 10 + value
        else:
            assert (name, value.value) == ("cuDeviceGetUuid_v2", 11)
            ctypes.memmove(out._obj, bytes(range(16)), 16)

    monkeypatch.setattr(gpu_owners, "call", call)
    assert gpu_owners.uuid(torch.device("cuda", 1)) == str(UUID(bytes=bytes(range(16))))
    assert gpu_owners.uuid(torch.device("cpu")) == ""

    def fails(*_):
        raise RuntimeError("the CUDA driver has no cuDeviceGetUuid_v2")

    monkeypatch.setattr(gpu_owners, "call", fails)
    assert gpu_owners.uuid(CUDA) == ""
