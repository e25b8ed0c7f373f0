"""Weights of 16 bits under activations of f32: what the same weights make in f32."""

import pytest
import torch
from phalanx.kernels.activation.activation import gated_activation
from phalanx.kernels.cpp import graph, ops
from phalanx.kernels.gemm import cpu_gemm
from phalanx.kernels.quantized import linear
from phalanx.kernels.quantized.linear import Halves

HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("outputs, inputs", [(1, 1), (10, 6), (46, 257), (64, 1000)])
def test_few_rows(isa, threads, called, dtype, outputs, inputs):
    packed = Halves(torch.randn(outputs, inputs).to(dtype))
    weight, made = packed.weight.float(), []
    for rows in (1, 2, 3, 5, 64):
        x = torch.randn(rows, 2 * inputs)[:, :inputs]
        for bias in (None, torch.randn(outputs)):
            made.append((linear.linear(x, packed, bias=bias), cpu_gemm.cpu_linear(x, weight, bias=bias)))
    whole = outputs // 8 * 8  # those behind are multiplied one by one, as the compiler likes it
    assert all(torch.equal(mine[:, :whole], want[:, :whole]) for mine, want in made)
    assert all(torch.allclose(mine, want, atol=1e-5, rtol=1e-5) for mine, want in made)
    assert called == [f"linear_f32_of_{ops.READ[dtype]}", "linear_f32"] * 10


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [0, 2, cpu_gemm.MAX_ROWS + 1])
def test_gates_and_many_rows(monkeypatch, dtype, rows):
    packed = Halves(torch.randn(80, 24).to(dtype))
    x, bias, weight = torch.randn(rows, 24), torch.randn(80), packed.weight.double()
    for panel in (1 << 20, 24 * 32):
        monkeypatch.setitem(linear.PANEL, "cpu", panel)
        for of in (None, bias):
            want = x.double() @ weight.T + (0 if of is None else of.double())
            torch.testing.assert_close(linear.linear(x, packed, bias=of), want.float(), atol=1e-5, rtol=1e-5)
            gated = linear.linear(x, packed, "silu", of)
            torch.testing.assert_close(gated, gated_activation(want.float(), "silu"), atol=1e-4, rtol=1e-5)


def test_it_is_recorded():
    if not ops.available():
        pytest.skip("no C++ compiler that works")
    packed, x = Halves(torch.randn(48, 32).bfloat16()), torch.randn(2, 32)
    result, made, reason = graph.capture(lambda: linear.linear(x, packed, "silu"), graph.Memory())
    assert reason == "" and len(made) == 2
    x.copy_(torch.randn(2, 32))
    made.replay()
    assert torch.equal(result, linear.linear(x, packed, "silu"))
