"""Expert deferral: what the CPU makes of a layer's experts is added in the next layer that has any."""

import functools
from types import SimpleNamespace

import pytest
import torch
from phalanx.kernels.cpp import ops
from phalanx.rank.model.experts.deferral import Deferral, Order
from phalanx.rank.model.experts.fused import FusedExperts
from phalanx.rank.model.experts.offload import ON_DEVICE, ExpertRoom

from ..harness import distance, run_steps, tokens
from ..test_architectures import MODELS, write
from .test_few_tokens import all_experts, layers_beside_gpu, split_up

ALL = 1 << 20
STEPS = [[(0, 9)], [(0, 1)], [(0, 1), (1, 1)], [(0, 1), (1, 1)], [(1, 1), (0, 3)]]
DECODED = slice(9, 12)  # of the first sequence, alone or beside another that decodes


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Of five layers: stages of two or three layers with experts."""
    more = {"qwen3_moe": {"decoder_sparse_step": 1, "mlp_only_layers": []}}
    sizes = {"num_hidden_layers": 5}
    return functools.cache(
        lambda name: write(tmp_path_factory.mktemp(name), **MODELS[name] | sizes | more.get(name, {}))
    )


def late(monkeypatch, layers):
    """Have each layer with experts hand out what the one before has made of single tokens, and the last one its own as
    well: all that deferral is where the CPU computes all experts. layers: of a stage."""
    held, multiply = [], FusedExperts.multiply

    def deferred(self, routed):
        y = multiply(self, routed)
        if len(routed) > 2:
            return y
        held.append(y)
        before = held[-2] if len(held) > 1 else torch.zeros_like(y)
        if len(held) == layers:
            held.clear()
            return before + y
        return before

    monkeypatch.setattr(FusedExperts, "multiply", deferred)


@pytest.mark.parametrize("tp, pp, ep", [(1, 1, 1), (2, 1, 2), (1, 2, 1)])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_sums_come_a_layer_late(made, monkeypatch, name, tp, pp, ep):
    """In steps in which each sequence has one token, and in no others; the last layer of a stage owes nothing."""
    given, ranks = (made(name), [tokens(15, seed=1), tokens(3, seed=2)], STEPS), dict(tp=tp, pp=pp, ep=ep)
    got = run_steps(*given, **ranks, experts=ExpertRoom(ALL, way="cpu", defers=True))
    plain = run_steps(*given)
    assert distance(got[0][:9], plain[0][:9]) < 1e-4 < 1e-3 < distance(got[0][DECODED], plain[0][DECODED])
    if tp * pp == 1:
        late(monkeypatch, len(all_experts(made(name), ON_DEVICE)[0]))
        want = run_steps(*given)
        assert all(distance(a, b) < 1e-4 for a, b in zip(got, want, strict=True))
    elif tp == 2:
        want = run_steps(*given, experts=ExpertRoom(ALL, way="cpu", defers=True))
        assert all(distance(a, b) < 1e-4 for a, b in zip(got, want, strict=True))


def test_what_is_resident_is_not_late(made):
    """With all experts resident nothing is."""
    given = made("qwen3_moe"), [tokens(15, seed=1), tokens(3, seed=2)], STEPS
    whole, defers = (run_steps(*given, experts=ExpertRoom(memory=1 << 40, defers=one)) for one in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(whole, defers, strict=True))


@pytest.mark.skipif(not ops.available(), reason="no C++ operations")
@pytest.mark.parametrize("split", ["", "all", "first", "before copies"])
@pytest.mark.parametrize("offload, way, copy", [(100, "cpu", 0.4), (3, "auto", 0.7), (3, "auto", 0.4)])
@torch.no_grad()
def test_beside_a_gpu(made, monkeypatch, offload, way, copy, split):
    """Its kernels are played. Each layer adds what the one before has left, so that nothing is lost in a step. copy: as
    in test_few_tokens.py, 0.4 lets the GPU copy some, which are not late. split: which layers' missing experts CPU and
    GPU compute together."""
    plain, _ = all_experts(made("qwen3_moe"), ON_DEVICE)
    layers, offloaded = all_experts(made("qwen3_moe"), ExpertRoom(offload, way=way, defers=True))
    played = layers_beside_gpu(monkeypatch, layers, offloaded, way)
    total, draw, differ = layers[0].down_proj.experts.size, torch.Generator().manual_seed(0), 0
    for layer in layers:
        layer.host._choice.costs = layer.host._choice.costs._replace(cpu=(1.0, 2.0, 3.0, 4.0), copy=copy)
    if split == "before copies":
        layers[-1].host._choice.costs = layers[-1].host._choice.costs._replace(copy=0.4)
    for layer in layers[: len(layers) if split == "all" else -1] if split else ():
        split_up(layer, layer.host.layer.stack.w2.shape[2] // 2)
    for count in (1, 3, 1, 4, 2) * 2:
        offloaded.begin([SimpleNamespace(sampled=None, num_decodes=count, ids=range(count))])
        got, want = [], []
        for layer, whole in zip(layers, plain, strict=True):
            x = torch.randn(count, layer.down_proj.outputs[0].size, generator=draw)
            ids = torch.stack([torch.randperm(total, generator=draw)[: layer.top_k] for _ in range(count)]).int()
            given = x, ids, torch.rand(count, layer.top_k, generator=draw)
            got.append(layer(*given).local())
            want.append(whole(*given).local())
        torch.testing.assert_close(sum(got), sum(want), atol=1e-5, rtol=1e-5)
        assert way != "cpu" or not got[0].any() and torch.allclose(got[1], want[0], atol=1e-5)
        differ += not torch.allclose(got[0], want[0], atol=1e-3)
    assert differ and played.sent == 10 * len(layers) and offloaded.counters.cpu > 0


def test_steps_that_defer():
    def step(decodes, tokens, sampled=None):
        return SimpleNamespace(num_decodes=decodes, ids=range(tokens), sampled=sampled)

    deferral = Deferral()
    for batches, defers in (
        ([step(1, 1)], True),
        ([step(16, 16)], True),
        ([step(17, 17)], False),
        ([step(1, 9)], False),
        ([step(1, 1, sampled=step(1, 1))], False),  # the last layer has fewer rows
        ([step(1, 1), step(1, 1)], False),
    ):
        deferral.begin(batches)
        assert deferral.step == defers
    deferral.allowed = False
    deferral.begin([step(1, 1)])
    assert not deferral.step


def test_the_order_of_layers():
    three = [Order(place, 3) for place in range(3)]
    assert [one.first for one in three] == [True, False, False] and [one.last for one in three] == [False, False, True]
    assert [one.buffer for one in three] == [0, 1, 0] and Order(0, 1).first and Order(0, 1).last
