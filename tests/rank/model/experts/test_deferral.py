"""Expert deferral: what the CPU makes of a layer's experts is added in the next layer that has any."""

import functools
from types import SimpleNamespace

import pytest
import torch
from phalanx.kernels.cpp import ops
from phalanx.rank.model.experts.deferral import Deferral
from phalanx.rank.model.experts.offload import ON_DEVICE, OffloadOptions

from ..harness import run_steps, tokens
from ..test_architectures import MODELS, write
from .test_small_batch import all_experts, beside_gpu

ALL = 1 << 20
STEPS = [[(0, 9)], [(0, 1)], [(0, 1), (1, 1)], [(0, 1), (1, 1)], [(1, 1), (0, 3)]]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model of five layers: stages of two or three layers with experts."""
    more = {"qwen3_moe": {"decoder_sparse_step": 1, "mlp_only_layers": []}}
    sizes = {"num_hidden_layers": 5}
    return functools.cache(
        lambda name: write(tmp_path_factory.mktemp(name), **MODELS[name] | sizes | more.get(name, {}))
    )


def test_on_cpus_no_sum_is_late(made):
    given = made("qwen3_moe"), [tokens(15, seed=1), tokens(3, seed=2)], STEPS
    plain, defers = (
        run_steps(*given, experts=OffloadOptions(ALL, placement="cpu", defers=one)) for one in (False, True)
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, defers, strict=True))


@pytest.mark.skipif(not ops.available(), reason="no C++ operations")
@pytest.mark.parametrize("offload, placement, copy", [(100, "cpu", 0.4), (3, "auto", 0.7), (3, "auto", 0.4)])
@torch.no_grad()
def test_beside_a_gpu(made, monkeypatch, offload, placement, copy):
    """Its kernels are played. Each layer adds what the one before has left, so that nothing is lost in a step. copy: as
    in test_small_batch.py, 0.4 lets the GPU copy some, which are not late."""
    plain, _ = all_experts(made("qwen3_moe"), ON_DEVICE)
    layers, offloaded = all_experts(made("qwen3_moe"), OffloadOptions(offload, placement=placement, defers=True))
    played = beside_gpu(monkeypatch, placement, *layers)
    total, draw, differ = layers[0].down_proj.experts.size, torch.Generator().manual_seed(0), 0
    for layer in layers:
        layer.host._choice.costs = layer.host._choice.costs._replace(cpu=(1.0, 2.0, 3.0, 4.0), copy=copy)
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
        assert placement != "cpu" or not got[0].any() and torch.allclose(got[1], want[0], atol=1e-5)
        differ += not torch.allclose(got[0], want[0], atol=1e-3)
    assert differ and played.sent == 10 * len(layers) and offloaded.counters.cpu > 0


def test_steps_that_defer():
    def step(decodes, tokens, sampled=None):
        return SimpleNamespace(num_decodes=decodes, ids=range(tokens), sampled=sampled)

    deferral = Deferral([])
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
