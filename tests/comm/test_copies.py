"""Two ranks' copies into each other's memory, with a driver that does at once what streams would do in order."""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from phalanx.comm import copies
from phalanx.kernels.allreduce import Peers

STRIDE = copies.ROOM + 512


class Driver:
    """Waits that are not over when they are asked for are looked at again after the other rank's call."""

    def __init__(self):
        self.waits: list[tuple[int, int]] = []

    def call(self, name, *args):
        values = [getattr(arg, "value", arg) for arg in args]
        if name == "cuMemcpyDtoDAsync_v2":
            to, source, size, _ = values
            ctypes.memmove(to, source, size)
        elif name == "cuStreamWriteValue32_v2":
            _, at, value, flags = values
            assert flags == 0  # what the stream wrote before is seen first
            ctypes.c_uint32.from_address(at).value = value
        else:
            assert name == "cuStreamWaitValue32_v2" and values[3] == copies._AT_LEAST == 0
            self.waits.append((values[1], values[2]))

    def settle(self):
        for at, value in self.waits:
            ahead = (ctypes.c_uint32.from_address(at).value - value) % (1 << 32)
            assert ahead < 1 << 31, "a wait that nobody ends"
        self.waits.clear()


@pytest.fixture
def pair(monkeypatch):
    regions = torch.zeros(2, STRIDE, dtype=torch.uint8)
    driver = Driver()

    def memory(address, size):
        start = address - regions.data_ptr()
        return regions.view(-1)[start : start + size]

    monkeypatch.setattr(copies, "memory", memory)
    monkeypatch.setattr(copies, "call", driver.call)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    ranks = [copies.Copies(Peers(rank, 2, regions.data_ptr(), STRIDE), 256) for rank in range(2)]
    return ranks, driver, regions


@pytest.mark.parametrize("calls", [0, 2**31 - 2, 2**32 - 2])
def test_each_gets_the_others(pair, calls):
    """Also where the number of the call wraps around."""
    ranks, driver, regions = pair
    for rank in ranks:
        rank._calls = calls
        ctypes.c_uint32.from_address(rank._here + 2 * copies.MOST).value = calls
    torch.manual_seed(0)
    before = []
    for rows, dtype in ((3, torch.bfloat16), (1, torch.float32), (5, torch.float16), (2, torch.bfloat16)):
        parts = torch.randn(2, rows, 33).to(dtype)
        got = [rank.exchange(part) for rank, part in zip(ranks, parts, strict=True)]
        driver.settle()
        assert torch.equal(got[0], parts[1]) and torch.equal(got[1], parts[0])
        for view, part in before:  # of the last call: its slot is another one
            assert torch.equal(view, part)
        before = [(got[0], parts[1]), (got[1], parts[0])]
    assert not regions[:, :256].any() and not regions[:, 256 + copies.ROOM :].any()


def test_the_largest(pair):
    ranks, driver, regions = pair
    x = torch.full((copies.MOST // 4,), 3, dtype=torch.int32)
    got = [rank.exchange(x) for rank in ranks for _ in range(2)]
    driver.settle()
    assert all(torch.equal(y, x) for y in got) and got[0].data_ptr() != got[1].data_ptr()
