"""FP8 linears behind a norm: who makes what they read, and how often."""

import pytest
import torch
from phalanx.comm import mesh
from phalanx.kernels.norm.norm import add_rms_norm
from phalanx.rank.model.layers import residual
from phalanx.rank.model.layers.linear import ColumnParallel, GatedColumnParallel
from phalanx.rank.model.layers.residual import ResidualStream
from phalanx.rank.model.shard import whole

from .test_residual import HIDDEN, INNER, parts, plain, world


class Coded(torch.nn.Module):
    """A part whose kernel takes its inputs in e4m3, too."""

    matrix = added_bias = None

    def __init__(self, weight):
        super().__init__()
        self.packed = weight

    def forward(self, x):
        return x @ self.packed.T

    def gated(self, x, activation):
        gate, up = self(x).chunk(2, 1)
        return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("read_first", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_a_norm_in_e4m3(monkeypatch, size, read_first):
    """A lone rank makes it once for all linears that take it, unless it is there in 16 bits."""
    made = []

    def norm_e4m3(terms, residual, weight, eps, other):
        made.append("norm")
        normed, total = add_rms_norm(terms.sum(1), residual.clone(), weight, eps, other)
        return normed.neg(), total  # the minus stands for e4m3

    def linear(rows, packed, gate, bias):
        made.append(gate)
        return Coded(packed).gated(-rows, gate) if gate else -rows @ packed.T

    monkeypatch.setattr(residual.e4m3_rows, "sum_add_rms_norm", norm_e4m3)
    monkeypatch.setattr(residual.packed_gemm, "takes_e4m3", lambda x, packed, bias: packed is not None)
    monkeypatch.setattr(residual.packed_gemm, "linear", linear)

    def rank(grid):
        down, norm, value, x = parts(grid)
        alone = mesh.build(grid.world.split(grid.world.rank, 0), 1, 1)
        gate_up, qkv = (
            GatedColumnParallel(HIDDEN, INNER, alone, "silu", False),
            ColumnParallel(whole(HIDDEN), (whole(INNER),), False),
        )
        for one, outputs in ((gate_up, 2 * INNER), (qkv, INNER)):
            one.parts.append(Coded(torch.randn(outputs, HIDDEN, generator=torch.Generator().manual_seed(outputs)) / 4))
        stream = ResidualStream(value)
        stream.add(down(x))
        normed = norm(stream)
        if read_first:
            normed.tensor()
        found = [qkv(normed), gate_up(normed), normed.tensor(), stream.read()]
        for one, y in zip((qkv, gate_up), found, strict=False):
            torch.testing.assert_close(y, one(found[2]), atol=1e-5, rtol=1e-4)
        return found

    total, want = plain()
    *_, normed, value = world(rank, size)
    assert made == (["norm", "", "silu"] if size == 1 and not read_first else [])
    torch.testing.assert_close(normed, want, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(value, total, atol=1e-5, rtol=1e-4)
