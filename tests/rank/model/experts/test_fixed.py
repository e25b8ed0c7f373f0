"""Experts that are on the device alone, as the host's memory cannot hold all: logits and choices are the same."""

import functools
from types import SimpleNamespace

import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.errors import MEMORY, FatalError
from phalanx.kernels import host_memory
from phalanx.rank.model import load_memory
from phalanx.rank.model.experts import node_copy
from phalanx.rank.model.experts.fused import FusedExperts, StackedLinear, tensors_of
from phalanx.rank.model.experts.offload import HOST_SPARED, ON_DEVICE, Offload, OffloadOptions
from phalanx.rank.model.load import load
from phalanx.rank.model.weights.dummy import Dummy

from ..harness import distance, run_steps, tokens
from ..test_architectures import MODELS, write
from .test_small_batch import beside_gpu, experts

STEPS = [[(0, 1)], [(1, 7)], [(0, 1), (1, 1)], [(1, 4), (0, 30)], [(0, 2)]]
WAYS = "auto", "cpu", "stream"
MEBI = 1 << 20


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    sizes = {"moe_intermediate_size": 64, "intermediate_size": 96, "hidden_size": 96, "head_dim": 32}  # of whole groups
    return functools.cache(lambda name: write(tmp_path_factory.mktemp(name), **MODELS[name] | sizes))


@pytest.fixture
def fix(monkeypatch):
    """Have as many experts of each layer fixed, where there are slots for them."""

    def count(fixed):
        monkeypatch.setattr(Offload, "fewest_fixed", lambda self, *_: min(fixed, self.slots, self.experts - 1))

    return count


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_logits(made, fix, name):
    """Bit by bit as with all in host memory, whatever is fixed, resident or forced; gpt_oss has biases."""
    sequences = [tokens(34, seed=1), tokens(12, seed=2)]
    want = run_steps(made(name), sequences, STEPS, experts=OffloadOptions(offload=1 << 20))
    for fixed, out, placement in [(1, 3, "auto"), (3, 2, "auto"), (1 << 20, 3, "auto"), (100, 1, "stream"), *(
        (2, 3, placement) for placement in WAYS)]:  # fmt: skip
        fix(fixed)
        got = run_steps(made(name), sequences, STEPS, experts=OffloadOptions(offload=out, placement=placement))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), (fixed, out, placement)
    fix(0)
    plain = run_steps(made(name), sequences, STEPS)
    assert all(distance(a, b) < 1e-5 for a, b in zip(want, plain, strict=True))


@pytest.mark.parametrize("tp, pp, ep", [(2, 1, 1), (2, 1, 2), (1, 2, 1)])
def test_ranks(made, fix, tp, pp, ep):
    ids = [tokens(30)]
    (want,) = run_steps(made("qwen3_moe"), ids, tp=tp, pp=pp, ep=ep)
    fix(2)
    (got,) = run_steps(made("qwen3_moe"), ids, tp=tp, pp=pp, ep=ep, experts=OffloadOptions(offload=2))
    assert distance(got, want) < 1e-5


@pytest.mark.parametrize("isq", ["q4k", "q6k", "q4_0", "q8_0", "fp8"])
def test_quantised(made, fix, isq):
    ids = [tokens(30)]
    (want,) = run_steps(made("qwen3_moe"), ids, isq=isq, experts=OffloadOptions(offload=3))
    fix(2)
    (got,) = run_steps(made("qwen3_moe"), ids, isq=isq, experts=OffloadOptions(offload=3))
    assert torch.equal(got, want)


def test_what_is_fixed_is_not_in_host_memory(made, fix, monkeypatch):
    """Nor kept from being given back there by the rest of a stack; also in memory that ranks of a node share."""
    fix(3)

    def rank(world):
        model = load(made("qwen3_moe"), mesh.build(world, 1, 1), experts=OffloadOptions(offload=4))
        layers = [one.host for one in model.modules() if isinstance(one, FusedExperts)]
        for one in layers:
            assert (one.fixed, one.local_experts.size, one.set.slots, one.slots.stack.size) == (3, 7, 3, 6)
            assert all(len(x) == 7 for x in one.layer.tensors)
        if world.size == 1:
            local_experts = [x for one in model.modules() if isinstance(one, StackedLinear) for x in one.parameters()]
            assert all(x.untyped_storage().nbytes() == x.nbytes for x in local_experts if x.dim() == 3)
        assert not model.offload._fixed
        return model.offload.sharers, [x for one in layers for x in one.layer.tensors]

    ((_, alone),) = threads.run(rank, 1)
    for sharers, local_experts in threads.run(rank, 2):
        assert sharers == 2 and all(torch.equal(a, b) for a, b in zip(local_experts, alone, strict=True))
    monkeypatch.setattr(node_copy, "share", lambda *_: None)
    for sharers, local_experts in threads.run(rank, 2):
        assert sharers == 1 and all(torch.equal(a, b) for a, b in zip(local_experts, alone, strict=True))


@pytest.mark.parametrize("isq", ["none", "q4k", "q4_0", "fp8"])
def test_the_host_never_has_more_than_was_checked(made, fix, monkeypatch, isq):
    """The experts that stay there and one stack: as each is loaded, and when it has been split."""
    fix(4)
    keep, took = Offload.keep, []

    def kept(self, module):
        def local_experts():
            stacks = [one for one in self._linears() if not all(x.is_meta for x in tensors_of(one.matrices))]
            tensors = [x for one in stacks for x in tensors_of(one.matrices)]
            return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())

        if isinstance(module, StackedLinear):
            took.append(local_experts())
            keep(self, module)
            took.append(local_experts())

    monkeypatch.setattr(Offload, "keep", kept)

    def rank(world):
        return load(made("qwen3_moe"), mesh.build(world, 1, 1), experts=OffloadOptions(offload=4), isq=isq).offload

    (offload,) = threads.run(rank, 1)
    assert 0 < max(took) <= offload.host_bytes + offload.split_bytes and took[-1] == offload.host_bytes
    assert (max(took) == took[-1]) == (isq != "none")  # what is packed is never there as a whole


def test_counters(made, fix):
    """Fixed experts count as resident, and never leave: chosen experts take other slots."""
    fix(4)

    def rank(world):
        model = load(made("qwen3_moe"), mesh.build(world, 1, 1), experts=OffloadOptions(offload=3))
        (*_, layer) = [one for one in model.modules() if isinstance(one, FusedExperts)]

        def step(*chosen):
            layer(torch.ones(1, 96), torch.tensor([chosen], dtype=torch.int32), torch.ones(1, 2)).local()

        counters, fixed = model.offload.counters, [x[-4:].clone() for x in layer.host.slots.tensors]
        step(0, 3)
        assert (counters.resident, counters.cpu + counters.streamed) == (2, 0)
        for turn in range(60):
            step(8, (7, 9)[turn // 30])
        assert counters.loaded > 0 and all(
            torch.equal(a[-4:], b) for a, b in zip(layer.host.slots.tensors, fixed, strict=True)
        )
        return True

    assert threads.run(rank, 1) == [True]


def beside(made, fix, monkeypatch, placement, fixed, out=3):
    plain, _ = experts(made("qwen3_moe"), ON_DEVICE)
    fix(fixed)
    layer, model = experts(made("qwen3_moe"), OffloadOptions(out, placement=placement))
    return plain, layer, model.counters, beside_gpu(monkeypatch, placement, layer)


@pytest.mark.sample(3)
@pytest.mark.parametrize("copy", [0.4, 0.7])
@pytest.mark.parametrize("placement, fixed", [("auto", 2), ("auto", 7), ("stream", 3), ("cpu", 3)])
@torch.no_grad()
def test_beside_a_gpu(made, fix, monkeypatch, placement, fixed, copy):
    """Its kernels being the CPU's: steps of few tokens by the exchange, others by copies; with 7 nothing else is
    resident. copy: as in test_small_batch.py."""
    plain, layer, counters, played = beside(made, fix, monkeypatch, placement, fixed)
    host = layer.host
    if placement == "auto":
        host._choice.costs = host._choice.costs._replace(cpu=(1.0, 2.0, 3.0, 4.0), copy=copy)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, synchronize=lambda: None))
    draw, chosen = torch.Generator().manual_seed(0), 0
    for count in (1, 3, 16, 1, 2, 5, 40, 600, *(7,) * 12, 1, 3, 16, 1, 2, 5, 40, 600):
        x = torch.randn(count, 96, generator=draw)
        ids = torch.stack([torch.randperm(10, generator=draw)[:2] for _ in range(count)]).int()
        if count == 7:  # that become resident
            ids[:] = torch.tensor([8, 9])
        weights = torch.rand(count, 2, generator=draw)
        torch.testing.assert_close(layer(x, ids, weights).local(), plain(x, ids, weights).local(), atol=1e-4, rtol=1e-4)
        chosen += 10 if count == 600 and placement != "cpu" else len(ids.unique())
    host._drain()
    assert counters.resident + counters.cpu + counters.streamed == chosen
    assert (counters.loaded > 0) == (placement == "auto" and fixed < 7)
    assert host._slot[:fixed].tolist() == [7 - fixed + one for one in range(fixed)]
    assert played.sent == 24


def placed(path, room, host_room, ranks=1, pp=1, layers=0):
    """The placement that ranks with a GPU would choose. layers: bytes of these that may be in host memory."""

    def rank(world):
        grid = mesh.build(world, 1, pp)
        model = load(path, grid, load_format="dummy")
        rooms, dtypes = (None, host_room), (torch.float32, torch.float32)
        need = load_memory.place_together(model, grid, (room, layers), dtypes, torch.device("cuda"), rooms, Dummy())
        return need, model.offload

    return threads.run(rank, ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_as_few_are_fixed_as_the_host_needs(tmp_path, ranks):
    """While a stack is split it is there twice, but for what is fixed; ranks of a node share their experts."""
    path, room = write(tmp_path, **MODELS["qwen3_moe"] | {"num_hidden_layers": 12}), OffloadOptions(offload=4)
    (plain_need, whole), *_ = placed(path, room, None, ranks)
    everything = whole.all_bytes
    assert (whole.fixed, whole.host_bytes) == (0, everything)
    assert all(one.fixed == 0 for _, one in placed(path, room, everything // ranks, ranks))  # no margin where all fit
    seen = set()
    for fixed in range(1, 7):
        hosted = everything * (10 - fixed) // 10
        host_room = int((hosted // ranks + whole._largest) / (1 - HOST_SPARED)) + 1
        for need, one in placed(path, room, host_room, ranks):
            assert one.fixed == (fixed if host_room < everything // ranks else 0)
            assert one.host_bytes == (hosted if one.fixed else everything) and need == plain_need
            assert one.fixed == 0 or one.host_bytes // ranks + one.split_bytes <= (1 - HOST_SPARED) * host_room
            seen.add(one.fixed)
    assert {0, 4, 5, 6} <= seen


@pytest.fixture
def no_tables(monkeypatch):
    """A GPU that cannot read tables in host memory: layers take all that there is for both."""
    monkeypatch.setattr(host_memory, "in_reach", lambda device: False)


def test_more_are_fixed_where_ranks_cannot_share_memory(tmp_path, monkeypatch, no_tables):
    """Also beside layers, which take host memory as well."""
    path, room = write(tmp_path, **MODELS["qwen3_moe"] | {"num_hidden_layers": 12}), OffloadOptions(offload=4)
    (_, whole), *_ = placed(path, room, None, 2)
    host_room, layers = int(0.9 * whole.all_bytes), whole.all_bytes // 10
    assert [one.fixed for _, one in placed(path, room, host_room, 2)] == [0, 0]
    monkeypatch.setattr(node_copy, "share", lambda *_: None)
    for size in (0, layers):
        ((_, alone),) = placed(path, room, host_room, layers=size)
        for _, one in placed(path, room, host_room, 2, layers=size):
            assert one.fixed == alone.fixed > 0 and one.sharers == 1
            assert one.host_bytes + one.split_bytes + size <= host_room


def test_a_stage_without_experts_fixes_none(tmp_path):
    sizes = {"num_hidden_layers": 24, "mlp_only_layers": [*range(12)]}
    path, room = write(tmp_path, **MODELS["qwen3_moe"] | sizes), OffloadOptions(offload=4)
    whole = max(one.all_bytes for _, one in placed(path, room, None, 2, pp=2))
    assert sorted(one.fixed > 0 for _, one in placed(path, room, int(0.95 * whole), 2, pp=2)) == [False, True]
    with pytest.raises(FatalError):
        placed(path, room, -1, 2, pp=2)


def test_layers_in_host_memory_leave_experts_less_of_it(tmp_path, no_tables):
    path, room = write(tmp_path, **MODELS["qwen3_moe"] | {"num_hidden_layers": 12}), OffloadOptions(offload=4)
    ((_, whole),) = placed(path, room, None)
    some = whole.all_bytes // 10
    fixed = [placed(path, room, whole.all_bytes + some, layers=size)[0][1].fixed for size in (0, 2 * some)]
    assert fixed[0] == 0 < fixed[1]


def test_what_both_cannot_hold_is_refused(made):
    path, room = made("qwen3_moe"), OffloadOptions(offload=8)
    ((_, whole),) = placed(path, room, None)
    for host_room in (whole.all_bytes // 2, 0):
        with pytest.raises(FatalError) as stop:
            placed(path, room, host_room)
        assert stop.value.code == MEMORY
        gb = [f"{size / 1e9:.2f} GB" for size in (whole.all_bytes, host_room, whole.resident_bytes)]
        for part in (f"take {gb[0]} of the host's memory", f"{gb[1]} are free for it", f"{gb[2]} of its GPU's", "2 of"):
            assert part in str(stop.value)
