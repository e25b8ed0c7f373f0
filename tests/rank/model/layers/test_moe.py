"""Experts that all tokens visit: with the others in one kernel where that takes them, or apart."""

import torch
from phalanx.kernels.moe.moe import expert_terms, takes_shared
from phalanx.kernels.moe.router import RouterParams
from phalanx.rank.model.experts import fused
from phalanx.rank.model.formats import dense
from phalanx.rank.model.layers.moe import SharedMoE
from phalanx.rank.model.weights.slicing import Source

from .test_residual import world

TOKENS, HIDDEN, EXPERTS, TOP = 5, 32, 4, 2


def layer(grid):
    one = SharedMoE(HIDDEN, 16, 24, EXPERTS, RouterParams(TOP), grid)
    for linear in (one.shared_experts.gate_up_proj, one.shared_experts.down_proj):
        linear.build([Source("x")] * len(linear.outputs), dense)
    generator = torch.Generator().manual_seed(2)
    for weight in one.to_empty(device="cpu").parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator) / 4)
    return one


def test_shared_experts_in_one_kernel(monkeypatch):
    """Asked with this rank's matrices, which make the same as linears of their own."""
    asked = []

    def takes(x, k, w13, w2, shared):
        asked.append((len(x), k, w13.shape, w2.shape, shared.w13.shape, shared.w2.shape))
        return True

    def terms(given, shared):
        gate, up = (given.x @ shared.w13.t()).chunk(2, 1)
        return expert_terms(given) + (torch.nn.functional.silu(gate) * up @ shared.w2.t())[:, None]

    def sums(grid):
        one, x = layer(grid), torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
        return [one(x).sum()]

    (want,) = world(sums)
    monkeypatch.setattr(fused, "takes_shared", takes)
    monkeypatch.setattr(fused, "terms_with_shared", terms)
    (got,) = world(sums)
    torch.testing.assert_close(got, want)
    assert asked == [(TOKENS, TOP, (EXPERTS, 32, HIDDEN), (EXPERTS, HIDDEN, 16), (48, HIDDEN), (HIDDEN, 24))]


def test_cpus_have_no_such_kernel(monkeypatch):
    def never(*_):
        raise AssertionError

    monkeypatch.setattr(fused, "terms_with_shared", never)
    world(lambda grid: [layer(grid)(torch.ones(TOKENS, HIDDEN)).sum()])
    assert not takes_shared(torch.ones(64, 128), 6, torch.empty(64, 256, 128), torch.empty(64, 128, 128), None)
