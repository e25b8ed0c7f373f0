"""Steps of few tokens beside a GPU, whose kernels are played on the CPU: what they and the host tell each other."""

import threading
import time

import numpy as np
import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.kernels import host_memory, jit
from phalanx.kernels.cpp import ops
from phalanx.kernels.moe import host_exchange
from phalanx.rank.model.experts.fused import FusedExperts
from phalanx.rank.model.experts.host_buffers import SharedBuffers
from phalanx.rank.model.experts.offload import ON_DEVICE, ExpertRoom
from phalanx.rank.model.load import load

from ..test_architectures import MODELS, write

pytestmark = pytest.mark.skipif(not ops.available(), reason="no C++ operations")


class Played:
    """What host_exchange.cu does. `collect` has nothing to add up before the CPU's part is given: it is done then."""

    def __init__(self, patch):
        self.waiting, self.fetched = [], 0
        patch.setattr(host_memory, "pin_memory", lambda memory: None)
        patch.setattr(host_memory, "check_pinned", lambda what, tensors: None)
        patch.setattr(torch.cuda, "Event", object)
        patch.setattr(host_exchange, "supports", lambda device: True)
        patch.setattr(host_exchange, "takes", lambda parts: True)
        patch.setattr(host_exchange, "table", lambda parts, device: parts)
        for name in ("send", "fetch", "collect"):
            patch.setattr(host_exchange, name, getattr(self, name))
        give = host_exchange.Exchange.give
        patch.setattr(host_exchange.Exchange, "give", lambda exchange: (give(exchange), self.done(exchange)))
        self.sent = 0

    def send(self, x, ids, weights, slots, host, exchange):
        self.sent += 1
        for there, given in zip(host, (x, ids, weights), strict=True):
            there.copy_(given)
        exchange.sent[0] = self.sent
        return slots[ids.long()]

    def fetch(self, parts, ids, most, first, exchange):
        count = int(exchange.list[0])
        experts = exchange.list[1 : 1 + count].tolist()
        numbers = torch.full_like(ids, most)
        for place, expert in enumerate(experts):
            numbers[ids == expert + first] = place
            for part in parts:
                part.here[place] = part.there[expert]
        self.fetched += count
        return numbers, torch.tensor([count]), torch.tensor(experts + [0] * (most - count))

    def collect(self, resident, copied, made, like, exchange):
        y = torch.empty_like(like)
        self.waiting.append((y, resident, copied, made))
        return y

    def done(self, exchange):
        assert int(exchange.made[0]) == self.sent
        for y, resident, copied, made in self.waiting:
            y.copy_(sum(x.float() for x in (resident, copied, made) if x is not None))
        self.waiting.clear()


def experts(path, room, **options):
    def rank(world):
        model = load(path, mesh.build(world, 1, 1), "cpu", "f32", experts=room, **options)
        return next(one for one in model.modules() if isinstance(one, FusedExperts)), model.offload

    return threads.run(rank, 1)[0]


def beside_gpu(patch, layer, made, way):
    """Have the layer's experts served as beside a GPU, whose part is Played."""
    host, played = layer.host, Played(patch)
    patch.setattr(jit, "plain", lambda *tensors: True)
    host.on_gpu, host.shared = True, host.shared.__class__(way, made.counters, SharedBuffers(), host.shared.streamer)
    return played


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("few"), **MODELS["qwen3_moe"] | {"moe_intermediate_size": 32})


@pytest.mark.parametrize("offload, way", [(100, "auto"), (3, "auto"), (3, "stream"), (3, "cpu")])
@torch.no_grad()
def test_both_sides_agree(path, monkeypatch, offload, way):
    (plain, _), (layer, made) = experts(path, ON_DEVICE), experts(path, ExpertRoom(offload, way=way))
    host, played = layer.host, beside_gpu(monkeypatch, layer, made, way)
    if way == "auto":
        host._choice.costs = host._choice.costs._replace(cpu=(1.0, 2.0, 3.0, 4.0), copy=0.7)
    draw = torch.Generator().manual_seed(0)
    total = layer.down_proj.experts.size
    for count in (1, 3, 16, 1, 2, 5) * 3:
        x = torch.randn(count, layer.down_proj.outputs[0].size, generator=draw)
        ids = torch.stack([torch.randperm(total, generator=draw)[: layer.top_k] for _ in range(count)]).int()
        weights = torch.rand(count, layer.top_k, generator=draw)
        torch.testing.assert_close(layer(x, ids, weights).local(), plain(x, ids, weights).local(), atol=1e-5, rtol=1e-5)
    counters = made.counters
    assert played.sent == 18 and played.fetched == counters.streamed
    assert (counters.streamed > 0) == (way != "cpu") and (counters.cpu > 0) == (way != "stream")
    assert (counters.resident > 0) == (offload == 3)


@torch.no_grad()
def test_a_part_of_the_cpu_that_fails(path, monkeypatch):
    """The GPU does not wait for it any more."""
    layer, made = experts(path, ExpertRoom(100, way="cpu"))
    beside_gpu(monkeypatch, layer, made, "cpu")

    class Failing:
        def __init__(self, *_):
            pass

        def end(self):
            raise MemoryError("no room")

    monkeypatch.setattr(ops, "Begun", Failing)
    total = layer.down_proj.experts.size
    ids = torch.arange(layer.top_k, dtype=torch.int32)[None] % total
    with pytest.raises(MemoryError):
        layer(torch.ones(1, layer.down_proj.outputs[0].size), ids, torch.ones(ids.shape)).local()
    exchange = layer.host.shared.buffers.exchange
    assert int(exchange.made[1]) == 1
    with pytest.raises(RuntimeError, match="has failed before"):
        exchange.wait()


def test_flags_between_threads(monkeypatch):
    monkeypatch.setattr(host_memory, "pin_memory", lambda memory: None)
    monkeypatch.setattr(host_memory, "check_pinned", lambda what, tensors: None)
    monkeypatch.setattr(host_exchange, "PAUSE", 20)
    exchange = host_exchange.Exchange(torch.device("cpu"))

    def device():
        for turn in range(1, 200):
            exchange.sent[0] = turn
            while int(exchange.made[0]) != turn:
                time.sleep(0)
            assert exchange.list[: 1 + turn % 3].tolist() == [turn % 3, 7, 8][: 1 + turn % 3]

    other = threading.Thread(target=device)
    other.start()
    for turn in range(1, 200):
        exchange.wait()
        exchange.ask(np.array([7, 8][: turn % 3]))
        exchange.give()
    other.join(20)
    assert not other.is_alive() and int(exchange.made[1]) == 0
    exchange.give_up()
    assert int(exchange.made[1]) == 1
