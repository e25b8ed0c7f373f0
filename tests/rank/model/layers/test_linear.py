"""Linears that are split over a tensor group: what a row-parallel one leaves to the norm that follows."""

import torch
from phalanx.comm import mesh, threads
from phalanx.comm.base import FusedComm
from phalanx.kernels.norm.norm import add_rms_norm
from phalanx.rank.model.formats._part import Part
from phalanx.rank.model.layers.linear import GatedColumnParallel, RowParallel
from torch import nn

from .test_residual import HIDDEN, INNER, filled, parts, threads_of_one, world


def test_a_group_may_add_a_bias_in_its_gemm(monkeypatch):
    """The rank that has the bias adds it; the others do not decline either."""
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
        assert one.only_part is (parts[0] if alone else None)
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
