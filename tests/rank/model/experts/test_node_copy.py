"""Replicas of one node have their experts in host memory once."""

import threading
from collections import Counter
from functools import partial
from itertools import count

import pytest
import torch
from phalanx.comm import hosts, mesh, threads
from phalanx.errors import FatalError
from phalanx.kernels import host_memory
from phalanx.rank.model import load as load_module
from phalanx.rank.model import load_memory
from phalanx.rank.model.experts import node_copy
from phalanx.rank.model.experts.fused import FusedExperts
from phalanx.rank.model.experts.offload import Offload, OffloadOptions
from phalanx.rank.model.load import load
from phalanx.rank.model.weights.dummy import Dummy

from ..test_architectures import MODELS, write

ALL = OffloadOptions(offload=1 << 20)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    sizes = {"moe_intermediate_size": 64, "intermediate_size": 96, "hidden_size": 96, "head_dim": 32}  # of whole groups
    return write(tmp_path_factory.mktemp("experts"), **MODELS["qwen3_moe"] | sizes)


def loaded(path, ranks, tp=1, pp=1, **options):
    def rank(world):
        model = load(path, mesh.build(world, tp, pp), experts=ALL, **options)
        layers = [one for one in model.modules() if isinstance(one, FusedExperts)]
        return model, [x for layer in layers for x in layer.host.layer.tensors]

    return threads.run(rank, ranks)


@pytest.mark.parametrize("isq", ["none", "q8_0"])
def test_the_same_memory_with_the_same_numbers(made, isq):
    ((_, alone),) = loaded(made, 1, isq=isq)
    ranks = loaded(made, 3, isq=isq)
    for model, tensors in ranks:
        assert model.offload.sharers == 3
        assert all(torch.equal(mine, want) for mine, want in zip(tensors, alone, strict=True))
        assert all(model.offload._node.holds(x) for x in tensors) and not model.offload._node.holds(alone[0])
    for of_all in zip(*(tensors for _, tensors in ranks), strict=True):
        of_all[0].view(-1).view(torch.uint8)[-1] ^= 1
        assert all(torch.equal(one, of_all[0]) for one in of_all)  # what one changes all see


@pytest.mark.parametrize("tp, pp", [(2, 1), (1, 2)])
def test_each_part_of_the_model_is_shared_by_the_ranks_that_have_it(made, tp, pp):
    ranks = loaded(made, 4, tp, pp)
    alone = loaded(made, 2, tp, pp)
    assert [model.offload.sharers for model, _ in ranks] == [2] * 4

    def same():
        routed = zip((tensors for _, tensors in ranks), (want for _, want in alone * 2), strict=True)
        return [all(torch.equal(a, b) for a, b in zip(*both, strict=True)) for both in routed]

    assert same() == [True] * 4
    ranks[0][1][0].view(-1)[0] += 1
    assert same() == [False, True, False, True]  # the other replica sees it, and nobody else


def test_ranks_of_other_nodes_have_their_own(made, monkeypatch):
    """Also of equal names, and where nothing tells them apart but that they cannot open each other's memory."""
    asked = count()
    monkeypatch.setattr(hosts, "_boot_id", lambda: f"boot{next(asked) // 2}")
    found = Counter(model.offload.sharers for model, _ in loaded(made, 4))
    assert found == {2: 4}
    monkeypatch.setattr(node_copy, "share", lambda group, size, able: None)
    assert [model.offload.sharers for model, _ in loaded(made, 2)] == [1, 1]


def test_a_job_makes_the_group_once():
    def rank(world):
        grid = mesh.build(world, 1, 1)
        groups = [node_copy.sharers(grid) for _ in range(2)]
        return [one is groups[0] and one.size == 2 for one in groups]

    assert threads.run(rank, 2) == [[True] * 2] * 2


@pytest.mark.parametrize("device, told", [
    ("cuda", "this rank's experts take .* of the host's memory, but 0.00 GB are free"),
    ("cpu", "this rank's weights take .* GB, but for it 0.00 GB are free"),
])  # fmt: skip
def test_memory_that_suffices_only_once_is_refused_where_it_cannot_be_shared(made, monkeypatch, device, told):
    where, dtypes = torch.device(device), (torch.float32, torch.float32)

    def rank(world, room=None):
        grid = mesh.build(world, 1, 1)
        model = load(made, grid, load_format="dummy")
        rooms = (room, None) if device == "cpu" else (None, room)
        need = load_memory.place_together(model, grid, (ALL, 0), dtypes, where, rooms, Dummy())
        return need, model.offload.host_bytes

    ((need, experts), _) = threads.run(rank, 2)
    room = need if device == "cpu" else 1_000_000
    assert threads.run(partial(rank, room=room), 2) == [(need, experts)] * 2
    monkeypatch.setattr(node_copy, "share", lambda group, size, able: None)
    with pytest.raises(FatalError, match=told):
        threads.run(partial(rank, room=room), 2)
    if device == "cpu":
        more = experts - experts // 2
        assert threads.run(partial(rank, room=need + more), 2) == [(need + more, experts)] * 2


def test_tables_count_once_where_experts_cannot_be_shared(tmp_path, monkeypatch):
    """It is planned again then: what suffices for a rank alone suffices for each of two."""
    path = write(tmp_path, **MODELS["qwen3_moe"] | {"vocab_size": 1 << 14})
    table = (1 << 14) * 48 * 4
    monkeypatch.setattr(host_memory, "in_reach", lambda device: True)
    monkeypatch.setattr(node_copy, "share", lambda group, size, able: None)

    def rank(world, room):
        model = load(path, mesh.build(world, 1, 1), load_format="dummy")
        given = (ALL, table), (torch.float32, torch.float32), torch.device("cuda"), (None, room), Dummy()
        need = load_memory.place_together(model, mesh.build(world, 1, 1), *given)
        return need, model.layer_offload.table_bytes, model.offload.host_bytes, model.offload.fixed

    ((need, held, experts, _),) = alone = threads.run(partial(rank, room=None), 1)
    room = held + 3 * experts  # which are read, and split
    assert held == table and room < 2 * table
    assert threads.run(partial(rank, room=room), 1) == alone
    assert threads.run(partial(rank, room=room), 2) == alone * 2


def test_no_rank_pins_before_all_have_filled_their_parts(made, monkeypatch):
    pin, fill, first, early = Offload.pin, load_module._fill, threading.Event(), []

    def pinned(self):
        first.set()
        return pin(self)

    def filled(*args):
        fill(*args)
        if threading.current_thread().name == "rank-1":
            early.append(first.wait(0.2))

    monkeypatch.setattr(Offload, "pin", pinned)
    monkeypatch.setattr(load_module, "_fill", filled)
    loaded(made, 2, way="striped")
    assert early == [False] and first.is_set()


def test_what_is_larger_than_predicted_stays_apart(made, monkeypatch):
    monkeypatch.setattr(node_copy, "SPARE", 0)
    monkeypatch.setattr("phalanx.rank.model.experts.fused.StackedLinear.host_bytes", lambda *_: 1)
    (_, first), (_, second) = loaded(made, 2)
    first[0].zero_()
    assert second[0].abs().sum() > 0
