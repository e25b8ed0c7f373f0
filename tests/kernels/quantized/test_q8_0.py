"""Q8_0 beside gguf-py's, bit for bit, and its GEMM beside f64 of the dequantised weight."""

import numpy as np
import pytest
import torch
from phalanx.kernels.cpp import graph, ops
from phalanx.kernels.quantized import blocks_cpu, int8_codes, linear, target
from phalanx.kernels.quantized.int8_codes import q8_0

from ..conftest import DTYPES, close

gguf = pytest.importorskip("gguf")
KIND = gguf.GGMLQuantizationType.Q8_0


def theirs(weight):
    """gguf-py's codes and scales of a weight [O, I], and what it makes of them."""
    blocks = gguf.quants.quantize(weight.float().numpy(), KIND)
    each = blocks.reshape(len(weight), -1, 34)
    codes = each[:, :, 2:].view(np.int8).reshape(weight.shape)
    return codes, each[:, :, :2].copy().view(np.float16)[:, :, 0], gguf.quants.dequantize(blocks, KIND)


def same(weight):
    codes, scales = q8_0.encode(weight)
    want = theirs(weight)
    assert np.array_equal(codes.numpy(), want[0]) and np.array_equal(scales.numpy(), want[1])
    assert codes.dtype == torch.int8 and scales.dtype == torch.float16
    for packed in (int8_codes.Encoded(codes, scales), q8_0.pack(codes, scales)):
        assert np.array_equal(linear.dequantize(packed).numpy(), want[2])


def awkward():
    """Halves, which are rounded away from zero, ends, zeros, and scales that f16 holds badly or not at all."""
    weight = torch.randn(9, 96) * torch.logspace(-8, 3, 9)[:, None]
    weight[0] = 0
    weight[1, :32] = torch.arange(-16, 16) + 0.5
    weight[1, 5] = 127
    weight[2, 32:64] = -1
    return weight


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_codes_of_each_instruction_set(isa, threads, called, dtype):
    same(awkward().clamp(-6e4, 6e4).to(dtype))
    assert called == [f"q8_0_encode_{ops.READ[dtype]}", "put_codes", "q8_0_dequantize_f32"]


def test_codes_on_a_device_that_cpus_will_read(monkeypatch):
    """Weights on another device are encoded there: C++ cannot reach it."""
    monkeypatch.setattr(int8_codes, "encode_in_cpp", lambda _: pytest.fail("C++ got memory that is not the host's"))
    with target.packed_for("cpu"):
        assert q8_0.encode(torch.empty(2, 64, device="meta")).codes.is_meta


def test_codes_without_a_compiler(monkeypatch):
    monkeypatch.setattr(ops, "available", lambda: False)
    same(awkward())
    monkeypatch.setattr(int8_codes, "CHUNK", 200)  # encoded two rows at a time
    same(awkward())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs, inputs", [(1, 32), (7, 64), (24, 352)])
def test_linear(isa, threads, called, dtype, outputs, inputs):
    packed = q8_0.pack(*q8_0.encode(torch.randn(outputs, inputs)))
    weight = linear.dequantize(packed).double()
    called.clear()
    for rows in (1, 2, 3, 4, 5, 7, 16, 64):
        x = torch.randn(rows, 2 * inputs).to(dtype)[:, :inputs]
        x.as_strided((rows, 2 * inputs), (2 * inputs, 1))[:, inputs:] = float("nan")  # read by nobody
        for bias in (None, torch.randn(outputs).to(dtype)):
            want = x.double() @ weight.T + (0 if bias is None else bias.double())
            close(linear.linear(x, packed, bias=bias), want, dtype, atol=inputs**0.5 * 4e-6)
    assert set(called) == {f"{name}_{ops.SUFFIXES[dtype]}" for name in ("split", "q8_0_linear")} and len(called) == 32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, blocks_cpu.MAX_ROWS + 1])
def test_gate_and_up(dtype, rows):
    packed = q8_0.pack(*q8_0.encode(torch.randn(2 * 24, 64) * 0.2))
    x, bias = torch.randn(rows, 64).to(dtype), torch.randn(48).to(dtype)
    gate, up = (x.float() @ linear.dequantize(packed).T + bias.float()).chunk(2, -1)
    atol = 1e-5 if dtype == torch.float32 else 5e-2  # what is between is rounded
    close(linear.linear(x, packed, "silu", bias), torch.nn.functional.silu(gate) * up, dtype, atol)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("compiled", [True, False])
def test_many_rows_and_what_is_left_to_torch(monkeypatch, dtype, compiled):
    """Panels of the dequantised weight, in one and in several."""
    if not compiled:
        monkeypatch.setattr(ops, "available", lambda: False)
    packed = q8_0.pack(*q8_0.encode(torch.randn(37, 96)))
    bias = torch.randn(37).to(dtype)
    for rows in (0, 1, blocks_cpu.MAX_ROWS + 1):
        x = torch.randn(rows, 96).to(dtype)
        want = x.float() @ linear.dequantize(packed, dtype).float().T + bias.float()
        for panel in (1 << 20, 960):
            monkeypatch.setitem(linear.PANEL, "cpu", panel)
            y = linear.linear(x, packed, bias=bias)
            assert y.dtype == dtype and y.is_contiguous()
            exact = dtype == torch.float32
            torch.testing.assert_close(y.float(), want, atol=1e-5 if exact else 8e-2, rtol=1e-5 if exact else 1e-2)


def test_numbers_of_different_sizes(isa):
    """Small numbers next to a group's largest add what they add in f32; a group of small numbers is as exact as any.

    Of numbers below 1e-29 the last planes' products are too small for f32."""
    packed = q8_0.pack(*q8_0.encode(torch.randn(17, 96)))
    x = torch.randn(3, 96) * torch.logspace(-27, 4, 3)[:, None]
    x[1, :32], x[1, 40], x[2, 32:] = 0, 1e4, 0
    want, size = x.double() @ linear.dequantize(packed).double().T, x.abs().amax(1, keepdim=True)
    assert ((linear.linear(x, packed) - want).abs() < 1e-5 * size).all()


def test_values_that_are_not_finite_stay_in_their_row(isa):
    packed, x = q8_0.pack(*q8_0.encode(torch.ones(20, 64))), torch.ones(5, 64)
    x[2, 33], x[4, 1] = float("nan"), float("inf")
    y = linear.linear(x, packed)
    assert not y[[2, 4]].isfinite().any() and ((y[[0, 1, 3]] - 64).abs() < 0.1).all()


def test_it_is_recorded():
    if not ops.available():
        pytest.skip("no C++ compiler that works")
    packed, x = q8_0.pack(*q8_0.encode(torch.randn(48, 64))), torch.randn(2, 64)
    result, made, reason = graph.capture(lambda: linear.linear(x, packed, "silu"), graph.Memory())
    assert reason == "" and len(made) == 3
    x.copy_(torch.randn(2, 64))
    want = linear.linear(x, packed, "silu")
    made.replay()
    torch.testing.assert_close(result, want)
