"""Steps of few tokens beside a GPU, whose kernels are played on the CPU: what they and the host tell each other."""

import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.kernels import host_memory, jit
from phalanx.kernels.cpp import ops
from phalanx.kernels.moe import host_exchange, host_service
from phalanx.kernels.moe.host_exchange import Fetched
from phalanx.rank.model.experts import small_batch
from phalanx.rank.model.experts.fused import FusedExperts
from phalanx.rank.model.experts.offload import ON_DEVICE, OffloadOptions
from phalanx.rank.model.experts.small_batch import SmallBatch
from phalanx.rank.model.load import load

from ..test_architectures import MODELS, write

pytestmark = pytest.mark.skipif(not ops.available(), reason="no C++ operations")


class Played:
    """Plays host_exchange.cu. `collect` has nothing to add up before the CPU's part is there: it is done then."""

    def __init__(self, patch):
        self.waiting, self.fetched, self.adopted, self.only = [], 0, 0, 0
        patch.setattr(host_memory, "pin_memory", lambda memory: None)
        patch.setattr(host_memory, "check_pinned", lambda what, tensors: None)
        patch.setattr(torch.cuda, "Event", object)
        patch.setattr(host_exchange, "supports", lambda device: True)
        patch.setattr(host_exchange, "takes", lambda parts: True)
        patch.setattr(host_exchange, "arrive", lambda parts: True)
        patch.setattr(host_exchange, "table", lambda parts, device: parts)
        for name in ("send", "fetch", "collect", "collect_only"):
            patch.setattr(host_exchange, name, getattr(self, name))
        run = SmallBatch.run
        patch.setattr(SmallBatch, "run", lambda few, steps, *args: self.done(steps.service, run(few, steps, *args)))
        self.sent = 0

    def send(self, x, ids, weights, slots, host, exchange):
        self.sent += 1
        for there, given in zip(host, (x, ids, weights), strict=True):
            there.copy_(given)
        exchange.sent[0] = self.sent
        return slots[ids.long()]

    def fetch(self, parts, ids, most, first, exchange):
        word = int(exchange.list[0])
        count = word & 511
        assert word >> 9 == self.sent
        entries = exchange.list[1 : 1 + count].tolist()
        experts, slots = [one & 0xFFFF for one in entries], [(one >> 16) - 1 for one in entries]
        numbers = torch.full_like(ids, most)
        for place, expert in enumerate(experts):
            numbers[ids == expert + first] = place
            for part in parts:
                part.here[place] = part.there[expert]
        self.fetched += count
        more = [0] * (most - count)
        return Fetched(numbers, torch.tensor([count]), torch.tensor(experts + more), torch.tensor(slots + more))

    def collect(self, resident, copied, made, like, exchange, fetched=None, slots=None, first=0):
        y = torch.empty_like(like)
        self.waiting.append((y, resident, copied, *made))
        if fetched is None or slots is None:
            return y
        for i in range(int(fetched.found)):
            expert, slot = int(fetched.of[i]), int(fetched.slots[i])
            if slot < 0:
                continue
            for part in slots.parts:
                part.here[slot] = part.there[i]
            self.enter(slots, expert, slot, first)
        return y

    def collect_only(self, resident, made, like, exchange, slots, first):
        count, entry = int(exchange.list[0]) & 511, int(exchange.list[1])
        assert int(exchange.list[0]) >> 9 == self.sent and count < 2
        y = self.collect(resident, None, made, like, exchange)
        self.only += 1
        if count:
            expert, slot = entry & 0xFFFF, (entry >> 16) - 1
            for part in slots.parts:
                assert part.permutation is None
                part.here[slot] = part.there[expert]
            self.enter(slots, expert, slot, first)
        return y

    def enter(self, slots, expert, slot, first):
        slots.table[first + slots.expert_in[slot]] = slots.none
        slots.table[first + expert] = slot
        slots.expert_in[slot] = expert
        self.adopted += 1

    def done(self, service, y):
        service.drain()
        assert int(service._made[0]) == self.sent
        for sums, *added in self.waiting:
            sums.zero_()
            for x in added:
                sums += 0 if x is None else x
        self.waiting.clear()
        return y


def experts(path, room, **options):
    layers, offload = all_experts(path, room, **options)
    return layers[0], offload


def all_experts(path, room, **options):
    """The experts of all layers that have any."""

    def rank(world):
        model = load(path, mesh.build(world, 1, 1), "cpu", "f32", experts=room, **options)
        return [one for one in model.modules() if isinstance(one, FusedExperts)], model.offload

    return threads.run(rank, 1)[0]


def beside_gpu(patch, placement, *layers):
    """Have the layers' experts served as beside a GPU, whose part is Played."""
    played = Played(patch)
    patch.setattr(jit, "plain", lambda *tensors: True)
    for layer in layers:
        layer.host.on_gpu = True
        layer.host.shared.placement = placement
    return played


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("few"), **MODELS["qwen3_moe"] | {"moe_intermediate_size": 32})


@pytest.mark.parametrize(
    "offload, placement, copy",
    [(100, "auto", 0.4), (3, "auto", 0.4), (100, "auto", 0.7), (3, "auto", 0.7), (3, "stream", 0.7), (3, "cpu", 0.7)],
)
@torch.no_grad()
def test_both_sides_agree(path, monkeypatch, offload, placement, copy):
    """copy: seconds of one, of which the CPU takes 1: with 0.7 it serves steps of few pairs alone."""
    (plain, _), (layer, made) = experts(path, ON_DEVICE), experts(path, OffloadOptions(offload, placement=placement))
    host, played = layer.host, beside_gpu(monkeypatch, placement, layer)
    if placement == "auto":
        host._choice.costs = host._choice.costs._replace(cpu=(1.0, 2.0, 3.0, 4.0), copy=copy)
    draw = torch.Generator().manual_seed(0)
    total = layer.down_proj.experts.size
    for count in (1, 3, 16, 1, 2, 5) * 3:
        x = torch.randn(count, layer.down_proj.outputs[0].size, generator=draw)
        ids = torch.stack([torch.randperm(total, generator=draw)[: layer.top_k] for _ in range(count)]).int()
        weights = torch.rand(count, layer.top_k, generator=draw)
        torch.testing.assert_close(layer(x, ids, weights).local(), plain(x, ids, weights).local(), atol=1e-5, rtol=1e-5)
    counters = made.counters
    assert played.sent == 18 and played.fetched == counters.streamed and played.adopted == counters.loaded
    assert (counters.streamed > 0) == (placement != "cpu")
    assert (counters.cpu > 0) == (placement != "stream")
    assert (counters.resident > 0) == (offload == 3)
    few = sum(count * layer.top_k <= small_batch.CPU_ROUTED for count in (1, 3, 16, 1, 2, 5) * 3)
    assert played.only == (few if (offload, placement, copy) == (3, "auto", 0.7) else 0)


@pytest.mark.parametrize("copy", [0.4, 0.7])
@torch.no_grad()
def test_what_is_chosen_again_and_again_becomes_resident(path, monkeypatch, copy):
    """One expert a step, where the CPU serves it alone, and meanwhile computes that one, too."""
    (plain, _), (layer, made) = experts(path, ON_DEVICE), experts(path, OffloadOptions(3, placement="auto"))
    host, played = layer.host, beside_gpu(monkeypatch, "auto", layer)
    host._choice.costs = host._choice.costs._replace(cpu=(1.0, 2.0, 3.0, 4.0), copy=copy)
    total, draw = layer.down_proj.experts.size, torch.Generator().manual_seed(0)
    ids = torch.arange(total - layer.top_k, total, dtype=torch.int32)[None]
    for _ in range(12):
        x = torch.randn(1, layer.down_proj.outputs[0].size, generator=draw)
        weights, before = torch.rand(1, layer.top_k, generator=draw), made.counters.loaded
        torch.testing.assert_close(layer(x, ids, weights).local(), plain(x, ids, weights).local(), atol=1e-5, rtol=1e-5)
        assert copy < 0.5 or made.counters.loaded - before < 2
    counters = made.counters
    assert counters.loaded == played.adopted == 3 and (played.only == 12) == (copy > 0.5)
    if played.only:
        assert counters.streamed == 0 and counters.resident + counters.cpu == 12 * layer.top_k


@pytest.mark.parametrize("other", ["", "slow", "cpu", "stream", "none resident", "arrive", "permutations"])
def test_when_the_cpu_serves_alone(path, monkeypatch, other):
    """The fewest pairs: where it is fast enough, one that becomes resident can come, and there are operations."""
    placement = other if other in ("cpu", "stream") else "auto"
    layer, made = experts(path, OffloadOptions(100 if other == "none resident" else 3, placement=placement))
    host = layer.host
    beside_gpu(monkeypatch, placement, layer)
    host._choice.costs = host._choice.costs._replace(cpu=(1.0,) * 4, copy=0.4 if other == "slow" else 0.7)
    if other == "arrive":
        monkeypatch.setattr(host_exchange, other, lambda parts: False)
    if other == "permutations":
        monkeypatch.setattr(host.shared.streamer, other, lambda layer: [])
    assert (host.small_batch._arrivals(1) is not None) == (other == "")
    assert host.small_batch.supports(torch.float32)


@torch.no_grad()
def test_a_part_of_the_cpu_that_fails(path, monkeypatch):
    """The GPU does not wait for it any more."""
    layer, made = experts(path, OffloadOptions(100, placement="cpu"))
    beside_gpu(monkeypatch, "cpu", layer)

    def fail(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(host_service.Service, "compute", fail)
    total = layer.down_proj.experts.size
    ids = torch.arange(layer.top_k, dtype=torch.int32)[None] % total
    x = torch.ones(1, layer.down_proj.outputs[0].size)
    with pytest.raises(MemoryError):
        layer(x, ids, torch.ones(ids.shape)).local()
    assert int(layer.host.shared.steps.exchange.made[1]) == 1
    with pytest.raises(RuntimeError, match="has failed before"):
        layer(x, ids, torch.ones(ids.shape)).local()
