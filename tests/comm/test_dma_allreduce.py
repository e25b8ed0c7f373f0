"""Two ranks' copies into each other's memory, each rank's stream an own queue, under random interleavings."""

import ctypes
import random

import pytest
import torch
from phalanx.comm import dma_allreduce, threads
from phalanx.kernels.collective.allreduce import SymmetricMemory

START = 256
STRIDE = START + dma_allreduce.REGION + 256


def word(at):
    return ctypes.c_uint32.from_address(at)


class Streams:
    """Queued work runs in order on each rank, and at random between them; a wait holds its rank up."""

    def __init__(self, seed=0):
        self.rng = random.Random(seed)
        self.queues = [[], []]
        self.rank = 0  # whose stream is the current one

    def call(self, name, *args):
        values = [getattr(arg, "value", arg) for arg in args]
        if name == "cuMemcpyDtoDAsync_v2":
            to, source, size, _ = values
            content = ctypes.string_at(source, size)
            self.put(lambda: ctypes.memmove(to, content, size))
        elif name == "cuStreamWriteValue32_v2":
            _, at, value, flags = values
            assert flags == 0  # what the stream wrote before is seen first
            self.put(lambda: setattr(word(at), "value", value))
        else:
            _, at, value, kind = values
            assert name == "cuStreamWaitValue32_v2" and kind == 0
            self.put(lambda: (word(at).value - value) % (1 << 32) < 1 << 31)

    def put(self, work):
        self.queues[self.rank].append(work)

    def run(self):
        while any(self.queues):
            ready = [queue for queue in self.queues if queue]
            self.rng.shuffle(ready)
            fast = self.rng.choice((1, 1, 9))  # one rank is ahead for a while
            done = [self.go(queue, fast if i else 1) for i, queue in enumerate(ready)]
            assert any(done), "both wait"

    def go(self, queue, most):
        for count in range(most):
            if not queue or queue[0]() is False:
                return count > 0
            queue.pop(0)
        return True


@pytest.fixture(scope="module")
def regions():
    return torch.zeros(2, STRIDE, dtype=torch.uint8)


@pytest.fixture
def make(monkeypatch, regions):
    def memory(address, size):
        start = address - regions.data_ptr()
        return regions.view(-1)[start : start + size]

    def made(seed=0):
        streams = Streams(seed)
        monkeypatch.setattr(dma_allreduce, "memory", memory)
        monkeypatch.setattr(dma_allreduce, "call", streams.call)
        monkeypatch.setattr(dma_allreduce, "current_stream", lambda: 7)
        for rank in range(2):
            word(flag(regions, rank)).value = 0
        return streams, [
            dma_allreduce.DmaAllReduce(SymmetricMemory(rank, 2, regions.data_ptr(), STRIDE), START) for rank in range(2)
        ]

    return made


def flag(regions, rank):
    return regions[rank].data_ptr() + START + 2 * dma_allreduce.MAX_BYTES


@pytest.mark.parametrize("calls", [0, 2**31 - 3, 2**32 - 3])
def test_each_gets_the_others_whatever_the_interleaving(make, regions, calls):
    """The reader of a call's part comes next on the rank's stream. Also where the number of the call wraps around."""
    torch.manual_seed(0)
    for seed in range(60):
        streams, ranks = make(seed)
        wrong = []

        def compare(got, want, wrong=wrong):
            if not torch.equal(got, want):
                wrong.append((got, want))

        for rank in range(2):
            ranks[rank]._calls = word(flag(regions, rank)).value = calls
        for _ in range(6):
            parts = torch.randn(2, seed % 3 + 1, 33).to((torch.bfloat16, torch.float32)[seed % 2])
            for rank in range(2):
                streams.rank = rank
                got = ranks[rank].exchange(parts[rank])
                streams.put(lambda got=got, want=parts[1 - rank]: compare(got, want))
        streams.run()
        assert not wrong, seed


def test_the_largest(make, regions):
    streams, ranks = make()
    parts = [torch.full((dma_allreduce.MAX_BYTES // 8,), 3 + i, dtype=torch.int64) for i in range(2)]
    for rank in range(2):
        streams.rank = rank
        got = ranks[rank].exchange(parts[rank])
        streams.put(lambda got=got, rank=rank: None if torch.equal(got, parts[1 - rank]) else 1 / 0)
    streams.run()
    assert not regions[:, :START].any() and not regions[:, START + dma_allreduce.REGION :].any()


class Works(dma_allreduce.DmaAllReduce):
    """Ranks as threads: trials, and where they fail."""

    fails: tuple[int, bool] | None = None  # which rank, and whether on its own memory
    tried: list = []  # noqa: RUF012

    def __init__(self, peers, start):
        self._rank = peers.rank

    def try_out(self, to):
        self.tried.append((self._rank, to))
        if self.fails == (self._rank, to == self._rank):
            raise RuntimeError("CUDA error 801 in cuStreamWaitValue32_v2: operation not supported")


@pytest.mark.parametrize("fails", [None, (0, True), (1, True), (1, False)])
def test_both_ranks_have_copies_or_none(monkeypatch, fails):
    monkeypatch.setattr(Works, "fails", fails)
    monkeypatch.setattr(Works, "tried", [])
    monkeypatch.setattr(dma_allreduce, "DmaAllReduce", Works)
    found = threads.run(lambda comm: dma_allreduce.try_dma_allreduce(comm, SymmetricMemory(comm.rank, 2, 0, 0), 0), 2)
    said = "CUDA error 801 in cuStreamWaitValue32_v2: operation not supported"
    for made, why in found:
        assert (made is None) == bool(why) == bool(fails)
        assert not fails or (f"rank {fails[0]} " in why and said in why)
    tried = sorted(Works.tried)
    assert tried == [(0, 0), (1, 1)] if fails and fails[1] else tried == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_trial(make, regions, rank):
    """Alone, and with the other one; it finds what does not arrive."""
    streams, ranks = make()
    streams.rank = rank
    call = dma_allreduce.call
    at_once = lambda name, *args: (call(name, *args), streams.run())  # noqa: E731
    dma_allreduce.call = at_once
    ranks[rank].try_out(rank)
    dma_allreduce.call = lambda name, *args: None if "Memcpy" in name else at_once(name, *args)
    regions[rank, START : START + 64] = 0
    with pytest.raises(RuntimeError, match=f"rank {rank}.*copies"):
        ranks[rank].try_out(rank)
