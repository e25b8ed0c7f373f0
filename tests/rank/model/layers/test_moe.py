"""Experts that all tokens visit: with the others in one kernel where that takes them, or apart."""

import pytest
import torch
from phalanx.kernels.moe.moe import expert_terms, takes_shared
from phalanx.kernels.moe.router import RouterParams
from phalanx.rank.model.experts import fused
from phalanx.rank.model.formats import dense
from phalanx.rank.model.layers.mlp import GatedMLP
from phalanx.rank.model.layers.moe import SharedMoE
from phalanx.rank.model.weights.slicing import Source

from ..harness import distance, run_steps, tokens
from ..test_architectures import MODELS, TOLERANCE, write
from .test_residual import world

TOKENS, HIDDEN, EXPERTS, TOP = 5, 32, 4, 2


def layer(grid, bias=False):
    one = SharedMoE(HIDDEN, 16, 24, EXPERTS, RouterParams(TOP), grid)
    one.shared_experts = GatedMLP(HIDDEN, 24, grid, "silu", bias)
    for linear in (one.shared_experts.gate_up_proj, one.shared_experts.down_proj):
        linear.build([Source("x")] * len(linear.outputs), dense)
    generator = torch.Generator().manual_seed(2)
    for weight in one.to_empty(device="cpu").parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator) / 4)
    return one


@pytest.fixture
def asked(monkeypatch):
    """In place of the kernel, which takes all that it is asked about: what that was."""
    found = []

    def takes(x, k, w13, w2, shared):
        found.append((len(x), k, w13.shape, w2.shape, shared.w13.shape, shared.w2.shape))
        return True

    def terms(given, shared):
        gate, up = (given.x @ shared.w13.t()).chunk(2, 1)
        return expert_terms(given) + (torch.nn.functional.silu(gate) * up @ shared.w2.t())[:, None]

    monkeypatch.setattr(fused, "takes_shared", takes)
    monkeypatch.setattr(fused, "terms_with_shared", terms)
    return found


def sums(grid, bias=False):
    one, x = layer(grid, bias), torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    return [one(x).sum(), one.experts(x, *one.gate(x)).sum() + one.shared_experts(x).sum()]


def test_shared_experts_in_one_kernel(asked):
    """Asked with this rank's matrices, which make the same as linears of their own."""
    got, want = world(sums)
    torch.testing.assert_close(got, want)
    assert asked == [(TOKENS, TOP, (EXPERTS, 32, HIDDEN), (EXPERTS, HIDDEN, 16), (48, HIDDEN), (HIDDEN, 24))]


def test_biases_need_linears_of_their_own(asked):
    got, want = world(lambda grid: sums(grid, True))
    torch.testing.assert_close(got, want)
    assert not asked


def test_uneven_slices_in_one_kernel(asked, expected, tmp_path):
    """Three ranks share 104 inner elements of shared experts and have 64, 40 and none, each with zeros up to 64."""
    path, ids = write(tmp_path, **MODELS["deepseek_v2"] | dict(moe_intermediate_size=52)), tokens(60)
    (logits,) = run_steps(path, [ids], tp=3, max_model_len=512)
    assert distance(logits, expected(path, ids)) < TOLERANCE
    assert asked and {one[-1][1] for one in asked} == {64}


def test_cpus_have_no_such_kernel(monkeypatch):
    def never(*_):
        raise AssertionError

    monkeypatch.setattr(fused, "terms_with_shared", never)
    world(lambda grid: [layer(grid)(torch.ones(TOKENS, HIDDEN)).sum()])
    assert not takes_shared(torch.ones(64, 128), 6, torch.empty(64, 256, 128), torch.empty(64, 128, 128), None)
