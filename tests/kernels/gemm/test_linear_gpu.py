"""GEMMs and GEMVs on a GPU against f64."""

import pytest
import torch
from phalanx.kernels.device import device_caps
from phalanx.kernels.gemm import linear, pipelined_gemm
from torch.nn.functional import gelu, silu

from ...devices import needs_tma, require_gpu
from ..gpu import poison  # noqa: F401

require_gpu()


def apart(got, want):
    assert got.shape == want.shape and got.isfinite().all()
    return ((got.double() - want).norm() / want.norm()).item() if got.numel() else 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("outputs, inputs", [(64, 512), (192, 4096), (128, 14336), (64, 1536), (128, 384), (96, 640)])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 8, 9, 16, 17, 31, 33, 64, 65])
def test_gemms_of_few_rows(rows, outputs, inputs, dtype):
    x, weight = (torch.randn(n, inputs, device="cuda").to(dtype) / 8 for n in (rows, outputs))
    for bias in (None, torch.randn(outputs, device="cuda").to(dtype)):
        want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        assert apart(linear.linear(x, weight, bias), want) < 4e-3
        assert apart(linear.gated_linear(x, weight, bias=bias), gate(want, dtype)) < 4e-3


def gate(y, dtype, act="silu"):
    """act of the first half of the outputs times the second half, both rounded."""
    first, second = y.to(dtype).double().chunk(2, 1)
    return (silu(first) if act == "silu" else gelu(first, approximate="tanh")) * second


@needs_tma
@pytest.mark.parametrize("gated", ["", "silu", "gelu_tanh"])
@pytest.mark.parametrize(
    "outputs, inputs, dtype",
    [(1344, 2048, torch.float16), (28672, 4096, torch.bfloat16), (4096, 14336, torch.bfloat16)],
)
@pytest.mark.parametrize("rows", [1, 7, 16, 29, 50, 64])
def test_pipelined_gemms(rows, outputs, inputs, gated, dtype):
    """Every config, twice in a row into memory that holds NaN: a race would show as a difference."""
    x, weight = (torch.randn(n, inputs, device="cuda").to(dtype) / 8 for n in (rows, outputs))
    bias = torch.randn(outputs, device="cuda").to(dtype)
    want = x.double() @ weight.double().T + bias.double()
    want = gate(want, dtype, gated) if gated else want
    found = device_caps(x.device)
    whole = pipelined_gemm.whole_tiles(rows, found)
    for config in pipelined_gemm.tile_configs(rows, inputs, whole):
        made = [pipelined_gemm.pipelined_gemm(x, weight, gated, bias, config) for _ in range(4)]
        assert all(apart(y, want) < 4e-3 for y in made), config
        differ = [(y != made[0]).nonzero() for y in made]
        assert not any(map(len, differ)), (config, [(len(at), at[:8].tolist(), at[-1:].tolist()) for at in differ])
