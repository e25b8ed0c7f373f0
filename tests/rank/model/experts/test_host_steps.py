"""Captured steps of few tokens: what is posted of each, and what counters say."""

import pytest
import torch
from phalanx.kernels import host_memory, segmented_graph
from phalanx.kernels.cpp import ops
from phalanx.kernels.moe import host_service
from phalanx.rank.model.experts.small_batch import Counters, Steps

pytestmark = pytest.mark.skipif(not ops.available(), reason="no C++ operations")


class Few:
    """A layer, which names itself and how many tokens there are."""

    streamer = property(lambda self: self)

    def __init__(self, name):
        self.name, self.lends = name, 0

    def lent(self):
        self.lends += 1

    def layer_of(self, view, tokens):
        if tokens > 3:
            raise MemoryError("no room")
        return host_service.Layer(f"{self.name}{view}{tokens}".encode(), ())


class SegmentedGraph:
    def __init__(self):
        self.functions = []

    def __len__(self):
        return 0

    def later(self, function):
        self.functions.append(function)


@pytest.fixture
def steps(monkeypatch):
    monkeypatch.setattr(host_memory, "pin_memory", lambda memory: None)
    monkeypatch.setattr(host_memory, "check_pinned", lambda what, tensors: None)
    made = Steps(torch.device("cpu"), Counters())
    made.posted = []
    monkeypatch.setattr(made.service, "post", made.posted.append)
    return made


def test_a_step_is_posted_whole(steps):
    """One function for all layers of a capture; what it posts is made once for so many tokens."""
    both, layers = (SegmentedGraph(), SegmentedGraph()), (Few("a"), Few("b"))
    for segmented in both:
        for few in layers:
            steps.add(segmented, few, "-")
    assert [len(segmented.functions) for segmented in both] == [1, 1]
    for tokens in (2, 1, 2):
        both[0].functions[0](tokens)
    assert [bytes(one.packed) for one in steps.posted] == [b"a-2b-2", b"a-1b-1", b"a-2b-2"]
    assert steps.posted[0] is steps.posted[2] and steps.posted[0].size == 2
    assert layers[0].lends == 3  # the first buffer is in use


class Graph:
    """In place of torch's: nothing is launched."""

    def capture_begin(self, pool, capture_error_mode):
        pass

    def capture_end(self):
        pass

    def replay(self):
        pass


def test_segments_are_posted_one_by_one(steps, monkeypatch):
    """The host's part of a layer that is served otherwise drains, and the layers behind it are not launched then."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    segmented, layers, seen = segmented_graph.SegmentedGraph(None), [Few(name) for name in "abc"], []

    def step():
        for few in layers:
            steps.add(segmented_graph.capturing(), few, "-")
            if few is layers[1]:
                segmented_graph.on_host(lambda tokens: seen.append([bytes(one.packed) for one in steps.posted]), 2)
        return torch.empty(0)

    segmented.capture(step)
    segmented.replay(2)
    assert seen == [[b"a-2b-2"]]
    assert [bytes(one.packed) for one in steps.posted] == [b"a-2b-2", b"c-2"]
    assert [few.lends for few in layers] == [1, 0, 1]  # the first buffer is in use again


def test_who_cannot_post_gives_up(steps):
    """The graph is launched then, and the GPU waits."""
    segmented = SegmentedGraph()
    steps.add(segmented, Few("a"), "-")
    with pytest.raises(MemoryError):
        segmented.functions[0](4)
    assert int(steps.exchange.made[1]) == 1 and not steps.posted


def test_counters(steps):
    totals = steps.service.totals[len(host_service.TIMES) :]
    for _ in range(2):
        totals += torch.tensor([4, 3, 2, 1])
        steps.count()
    assert vars(steps.counters) == dict(resident=8, cpu=6, streamed=4, loaded=2)
    steps.counters.cpu += 10  # by steps of many tokens
    totals += 1
    steps.drain()
    assert vars(steps.counters) == dict(resident=9, cpu=17, streamed=5, loaded=3)
