"""Linears that are split over a tensor group: what a row-parallel one leaves to the norm that follows."""

import torch
from phalanx.comm import mesh
from phalanx.kernels.norm.norm import rms_norm
from phalanx.rank.model.layers import linear
from phalanx.rank.model.layers.linear import RowParallel

from .test_residual import HIDDEN, INNER, filled, parts, threads_of_one, world


def test_a_norm_adds_up_the_partial_sums_of_a_linear(monkeypatch):
    monkeypatch.setattr(
        linear.split_k_gemm, "partial_sums", lambda x, weight: torch.stack((x @ weight.T, x @ weight.T), 1)
    )

    def run(grid):
        down, norm, value, x = parts(grid)
        normed, stream = down(x).add_norm(value.clone(), norm)
        torch.testing.assert_close(stream, value + 2 * x @ down.matrix.T)
        torch.testing.assert_close(normed, rms_norm(stream, norm.rms_weight, norm.eps))
        return [normed]

    world(run)
    assert filled(RowParallel(INNER, HIDDEN, mesh.build(threads_of_one(), 1, 1), bias=True)).terms_of(None) is None
