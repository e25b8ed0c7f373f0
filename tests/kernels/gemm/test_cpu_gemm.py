"""Products of a few rows beside f64, on odd sizes, strided rows and damaged surroundings."""

import pytest
import torch
from phalanx.kernels.cpp import ops
from phalanx.kernels.gemm import cpu_gemm
from phalanx.kernels.gemm.linear import PACK_FROM, gated_linear, linear, pack

from ..conftest import DTYPES, close


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs, inputs", [(1, 1), (4, 8), (9, 6), (255, 257), (64, 1000), (24, 1040)])
def test_linear(isa, threads, called, dtype, outputs, inputs):
    weight = torch.randn(outputs, inputs).to(dtype)
    for rows in (1, 2, 3, 4, 5, 7, 16, 64):
        x = torch.randn(rows, 2 * inputs).to(dtype)[:, :inputs]
        x.as_strided((rows, 2 * inputs), (2 * inputs, 1))[:, inputs:] = float("nan")  # read by nobody
        for bias in (None, torch.randn(outputs).to(dtype)):
            want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
            close(linear(x, weight, bias), want, dtype, atol=inputs**0.5 * 4e-6)
    assert set(called) == {f"linear_{ops.SUFFIXES[dtype]}"} and len(called) == 16


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_and_up(isa, threads, called, dtype):
    x, weight = torch.randn(3, 40).to(dtype), (torch.randn(2 * 24, 40) * 0.2).to(dtype)
    gate, up = (x.float() @ weight.float().T).chunk(2, -1)
    atol = 1e-5 if dtype == torch.float32 else 3e-2  # what is between is rounded
    close(gated_linear(x, weight), torch.nn.functional.silu(gate) * up, dtype, atol)
    assert called[0].startswith("linear") and called[1].startswith("gated_silu")


def test_values_that_are_not_finite_reach_their_row_and_output_alone(isa):
    x, weight = torch.ones(5, 100), torch.ones(9, 100)
    x[2, 99], weight[8, 3] = float("nan"), float("inf")
    y = linear(x, weight)
    assert y[2].isnan().all() and (y[[0, 1, 3, 4], 8] == float("inf")).all()
    assert (y[[0, 1, 3, 4], :8] == 100).all()


def test_weights_stay_plain_for_it():
    weight = torch.randn(PACK_FROM // 64, 128)
    assert pack(weight) is weight


def test_what_is_left_to_torch(called):
    weight = torch.randn(8, 6)
    assert linear(torch.randn(cpu_gemm.MAX_ROWS + 1, 6), weight).shape == (cpu_gemm.MAX_ROWS + 1, 8)
    assert linear(torch.randn(0, 6), weight).shape == (0, 8)
    assert linear(torch.randn(6, 2).T, weight).shape == (2, 8)  # rows whose elements lie apart
    assert linear(torch.randn(2, 8), torch.randn(8, 6).T).shape == (2, 6), "a transposed weight"
    assert linear(torch.randn(2, 6).half(), weight.half()).dtype == torch.float16
    assert called == []
