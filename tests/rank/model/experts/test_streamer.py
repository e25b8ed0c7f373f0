"""Copies of experts by CUDA streams that only note what comes after what: no GPU is needed to see a race."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from phalanx.kernels.cpp import ops
from phalanx.kernels.moe.host_experts import Experts
from phalanx.kernels.quantized.int8_codes import q8_0
from phalanx.kernels.quantized.stack import stack
from phalanx.rank.model.experts import streamer
from phalanx.rank.model.experts.host_buffers import HostStack

EXPERTS = 6


class Order:
    """The launches, what each waits for, and which memory it reads and writes."""

    def __init__(self):
        self.step = self.current = Stream()
        self.launched = []

    @contextlib.contextmanager
    def within(self, stream):
        self.current, before = stream, self.current
        yield
        self.current = before

    def launch(self, name, reads=(), writes=()):
        touched = [{x.data_ptr() for x in some} for some in (reads, writes)]
        self.launched.append(
            SimpleNamespace(name=name, after=set(self.current.after), reads=touched[0], writes=touched[1])
        )
        self.current.after.add(len(self.launched) - 1)

    def races(self):
        """Pairs that use the same memory, one of them to write, in no order."""
        routed = ((i, j) for j in range(len(self.launched)) for i in range(j) if i not in self.launched[j].after)
        both = ((self.launched[i], self.launched[j]) for i, j in routed)
        return [(a.name, b.name) for a, b in both if a.writes & (b.reads | b.writes) or b.writes & a.reads]

    def waits(self, one, other):
        """Whether `one` begins after the end of `other`."""
        (index,) = (i for i, launched in enumerate(self.launched) if launched.name == other)
        (after,) = (launched.after for launched in self.launched if launched.name == one)
        return index in after


class Stream:
    def __init__(self, device=None):
        self.after = set()

    def wait_event(self, event):
        self.after |= event.after

    def wait_stream(self, stream):
        self.after |= stream.after


@pytest.fixture
def order(monkeypatch):
    made = Order()

    class Event:
        after = frozenset()

        def record(self):
            self.after = set(made.current.after)

    cuda = SimpleNamespace(Stream=Stream, Event=Event, stream=made.within, current_stream=lambda: made.current)
    monkeypatch.setattr(
        streamer, "torch", SimpleNamespace(cuda=cuda, **{n: getattr(torch, n) for n in ("zeros", "uint8")})
    )
    return made


def layers(quantised):
    gpu = torch.device("cpu") if not quantised else SimpleNamespace(type="cuda")
    made = []
    for seed in range(3):
        weights = torch.randn(2, EXPERTS, 32, 32, generator=torch.Generator().manual_seed(seed))
        if quantised:
            weights = [stack(q8_0, lambda e, of=one: q8_0.encode(of[e]), one.shape) for one in weights]
        made.append(HostStack(Experts(*weights), gpu))
    return made


@pytest.mark.parametrize("kinds", ["plain", "repacked", "both"])
def test_nothing_is_overwritten_while_it_is_read_and_copies_run_ahead(kinds, order, monkeypatch):
    if kinds != "plain" and not ops.available():
        pytest.skip("no C++ compiler that works")
    monkeypatch.setattr(streamer, "BUFFER", 1)  # an expert at a time
    plain, packed = layers(False), layers(True) if kinds != "plain" else []
    of = plain if kinds == "plain" else packed if kinds == "repacked" else [plain[0], packed[1], plain[2]]
    copies = streamer.Streamer(of, torch.device("cpu"))
    copies._streams = streamer._Streams(torch.device("cpu"))
    number, begins = 0, set()
    monkeypatch.setattr(streamer, "_copy", lambda raw, *_: order.launch(f"copy {number}", writes=raw.tensors))

    def make(raw, to, *_):
        order.launch(f"make {number}", raw.tensors, [x for some in to for x in some])

    monkeypatch.setattr(copies, "_make", make)
    for layer in of:
        order.launch(f"attention {number}")
        begins.add(number)
        for _, buffer in copies.copies(layer, np.arange(EXPERTS)):
            order.launch(f"experts {number}", buffer.tensors)
            number += 1
    assert number > 2 * EXPERTS and len(begins) == 3 and order.races() == []
    for i in range(number):
        assert order.waits(f"experts {i}", f"copy {i}")
        assert i < 1 or not order.waits(f"copy {i}", f"experts {i - 1}")  # the one before computes meanwhile
        if i in begins - {0}:
            assert not order.waits(f"copy {i}", f"attention {i}"), (
                "the layer's first copies run beside what comes before"
            )
        if kinds == "repacked" and i > 1:
            assert not order.waits(f"copy {i}", f"experts {i - 2}") and order.waits(f"copy {i}", f"make {i - 2}")


def test_a_missing_wait_is_seen(order, monkeypatch):
    """So that the test above tells something."""
    monkeypatch.setattr(Stream, "wait_event", lambda self, event: None)
    with pytest.raises(AssertionError, match="copy 2"):
        test_nothing_is_overwritten_while_it_is_read_and_copies_run_ahead("plain", order, monkeypatch)


def test_neighbours_come_in_one_copy(monkeypatch):
    copied = []
    monkeypatch.setattr(
        streamer, "_put", lambda to, given: copied.append((len(given[0]), to[0].shape == given[0].shape))
    )
    (layer, *_) = layers(False)
    made = streamer.Streamer([layer], torch.device("cpu"))
    for some, _ in made.copies(layer, np.array([5, 0, 1, 3, 4])):
        assert some.tolist() == [0, 1, 3, 4, 5]
    assert copied == [(2, True), (3, True)]
