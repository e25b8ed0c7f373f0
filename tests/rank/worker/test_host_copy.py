"""Weights that leave their device and come back, on the CPU in the place of a GPU."""

import functools

import pytest
import torch
from phalanx.comm.threads import run
from phalanx.errors import HostMemoryError
from phalanx.rank.worker import host_copy
from phalanx.rank.worker.host_copy import HostCopy, storages
from torch import nn

CPU = torch.device("cpu")


class Packed:
    """Weights that are no parameters."""

    __slots__ = ("codes",)

    def __init__(self, codes):
        self.codes = codes


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.arange(4.0))
        merged = torch.arange(64, dtype=torch.uint8)
        self.packed = {"a": Packed(merged[:32]), "b": [Packed(merged[32:].view(4, 8))]}
        bias = torch.ones(8)
        self.apply_bias = functools.partial(torch.add, bias)
        self.closed = lambda x: x + bias[0]
        self.empty = torch.empty(0)

    def forward(self, x):
        return self.closed(self.apply_bias(self.linear(x)))


def test_all_tensors_are_found_once():
    net = Net()
    sizes = sorted(storage.nbytes() for storage in storages(net, CPU))
    assert sizes == [16, 32, 32, 64, 256]  # scale, linear.bias, bias, merged, linear.weight
    assert storages(net, torch.device("meta")) == []


def test_weights_leave_and_come_back():
    net, x = Net(), torch.randn(2, 8)
    before, views = net(x), (net.packed["a"].codes, net.packed["b"][0].codes)
    found = storages(net, CPU)
    for _ in range(2):  # as often as a model sleeps
        copy = HostCopy(list(found))
        copy.give_device_memory()
        assert all(storage.nbytes() == 0 for storage in found)
        taken = [torch.full((64,), 7, dtype=torch.uint8) for _ in range(8)]  # others use the memory meanwhile
        copy.restore()
        assert torch.equal(net(x), before)
        assert torch.equal(views[0], torch.arange(32, dtype=torch.uint8)) and int(views[1][3, 7]) == 63
        assert net.packed["a"].codes.untyped_storage().data_ptr() == views[1].untyped_storage().data_ptr()
        del taken


def test_memory_that_others_lent_stays():
    import numpy as np

    lent = torch.from_numpy(np.ones(8))
    assert storages([lent], CPU) == []


def test_the_host_has_no_memory(monkeypatch):
    def refuse(*_, **__):
        raise HostMemoryError("no")

    monkeypatch.setattr(host_copy.host_memory, "zeros", refuse)
    net = Net()
    with pytest.raises(HostMemoryError):
        HostCopy(storages(net, CPU))
    assert net.linear.weight.untyped_storage().nbytes() == 256


def test_what_ranks_talk_with_is_not_moved():
    def found(world):
        net = Net()
        net.tensor = world
        world.buffer = torch.ones(1000)
        return sorted(storage.nbytes() for storage in storages(net, CPU))

    assert run(found, 2) == [[16, 32, 32, 64, 256]] * 2
