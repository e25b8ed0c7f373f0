"""Linears that are split over a tensor group: what a row-parallel one leaves to the norm that follows."""

import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.comm.base import FusedComm
from phalanx.kernels.norm.norm import add_rms_norm, rms_norm
from phalanx.rank.model.formats.dense import Part
from phalanx.rank.model.layers import linear, residual
from phalanx.rank.model.layers.linear import GatedColumnParallel, RowParallel
from phalanx.rank.model.layers.residual import ResidualStream
from torch import nn

from .test_residual import HIDDEN, INNER, filled, parts, threads_of_one, world


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_a_norm_adds_up_the_partial_sums_of_a_linear(biased, both, monkeypatch):
    """And its bias, alone or with another linear."""
    asked = []

    def partial_sums(x, weight, bias):
        asked.append(bias)
        return torch.stack((x @ weight.T, x @ weight.T), 1)

    monkeypatch.setattr(linear.split_k_gemm, "partial_sums", partial_sums)

    def run(grid):
        down, norm, value, x = parts(grid)
        if biased:
            down = filled(RowParallel(INNER, HIDDEN, grid, bias=True))
        bias = down.added_bias if biased else 0
        part = down(x) + down(x) if both else down(x)
        normed, stream = part.add_norm(value.clone(), norm)
        torch.testing.assert_close(stream, value + (2 + both) * x @ down.matrix.T + (1 + both) * bias)
        torch.testing.assert_close(normed, rms_norm(stream, norm.rms_weight, norm.eps))
        assert not biased or down.added_bias.abs().max() > 0.1
        return [normed]

    world(run)
    assert asked == [biased]


@pytest.mark.parametrize("able", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_lone_ranks_gemm_adds_its_bias_too(scale, able, monkeypatch):
    """Where the library has both in one call, and the bias is not scaled."""
    monkeypatch.setattr(residual, "accumulates", lambda *_: True)

    def accumulate(x, weight, bias, y):
        if able:
            y += x @ weight.T + bias
        return able

    monkeypatch.setattr(residual, "accumulate_linear", accumulate)
    grid = mesh.build(threads_of_one(), 1, 1)
    _, _, value, x = parts(grid)
    down = filled(RowParallel(INNER, HIDDEN, grid, bias=True))
    want = value + scale * (x @ down.matrix.T + down.added_bias)
    stream = ResidualStream(value)
    stream.add(down(x) * scale)
    assert (stream.pending is None) is (able and scale == 1.0)
    torch.testing.assert_close(stream.read(), want, atol=1e-5, rtol=1e-4)


def test_a_group_may_add_a_bias_in_its_gemm(monkeypatch):
    """Of the rank that has it; the others do not decline either."""
    asked = []

    class Fused(threads.ThreadComm, FusedComm):
        def gemm_all_reduce_add_norm(self, x, matrix, stream, weight, eps, bias=None):
            asked.append(bias is None)
            return add_rms_norm(self.all_reduce(x @ matrix.T + (0 if bias is None else bias)), stream, weight, eps)

    monkeypatch.setattr(threads, "ThreadComm", Fused)

    def rank(grid):
        _, norm, value, x = parts(grid)
        return filled(RowParallel(INNER, HIDDEN, grid, bias=True))(x).add_norm(value, norm)

    _, value = world(rank, 3)
    assert sorted(asked) == [False, True, True]
    grid = mesh.build(threads_of_one(), 1, 1)
    down, (_, _, old, x) = filled(RowParallel(INNER, HIDDEN, grid, bias=True)), parts(grid)
    torch.testing.assert_close(value, old + x @ down.matrix.T + down.added_bias, atol=1e-5, rtol=1e-4)


def test_what_a_linear_multiplies_with_is_what_lies_there_now():
    """Weights that are put in another's place as layers are offloaded, and parts that are replaced or added."""
    grid = mesh.build(threads_of_one(), 1, 1)
    one = filled(GatedColumnParallel(HIDDEN, INNER, grid, "silu", bias=True))
    x = torch.randn(3, HIDDEN)

    def check(*parts):
        alone = len(parts) == 1
        assert one.lone is (parts[0] if alone else None)
        assert one.matrix is (parts[0].weight if alone else None)
        assert one.added_bias is (parts[0].bias if alone else None)
        y = torch.cat([x @ part.weight.T + part.bias for part in parts], 1)
        torch.testing.assert_close(one.multiply(x), y)
        torch.testing.assert_close(one(x), torch.nn.functional.silu(y[:, :INNER]) * y[:, INNER:])

    (first,) = one.parts
    check(first)
    for name, like in (("weight", first.weight), ("bias", first.bias)):
        setattr(first, name, nn.Parameter(torch.randn(like.shape) / 4, requires_grad=False))
        check(first)
    second, third = (Part(one.inputs, one.outputs[:1], True, first.sources[:1]) for _ in range(2))
    for part, rows in ((second, slice(INNER)), (third, slice(INNER, 2 * INNER))):
        part.weight, part.bias = (nn.Parameter(y[rows].data, requires_grad=False) for y in (first.weight, first.bias))
    one.parts = nn.ModuleList((second,))
    one.parts.append(third)
    check(second, third)
    one.parts = nn.ModuleList((first,))
    check(first)
    first.adds_bias = False
    assert one.added_bias is None
