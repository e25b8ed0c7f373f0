"""e4m3 on CPUs: each instruction set's codes, weights and linears beside torch's."""

import pytest
import torch
from phalanx.kernels.activation.activation import gated_activation_reference
from phalanx.kernels.cpp import ops
from phalanx.kernels.quantized import e4m3, e4m3_cpu, floats, linear

from ..conftest import DTYPES
from .floats_cases import SIZES, make

# Outputs, inputs, inputs of a scale.
OF_CODES = [(48, 256, 256), (17, 1024, 512), (5, 1536, 512), (20, 384, 128), (3, 192, 64), (1, 96, 32)]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("outputs, inputs, unit", OF_CODES)
def test_codes(isa, threads, called, dtype, outputs, inputs, unit):
    """Weights of all sizes: torch's rounding, bit for bit; zeros stay zeros."""
    weight = torch.randn(outputs, inputs).mul_(10 ** torch.randn(outputs, inputs)).clamp_(-6e4, 6e4).to(dtype)
    weight[0, : inputs // 3] = 0
    codes, scales = e4m3.encode(weight)
    assert called == [f"e4m3_encode_{ops.READ[dtype]}"]
    want, by = e4m3.encode_reference(weight, unit)
    assert torch.equal(scales, by)
    same = codes.view(torch.float8_e4m3fn).float() == want.view(torch.float8_e4m3fn).float()
    assert same.all()  # but for the sign of zeros


def test_codes_of_a_row_of_zeros(isa):
    codes, scales = e4m3.encode(torch.zeros(2, 128))
    assert not codes.any() and not scales.any()


@pytest.mark.parametrize("outputs, inputs, unit", SIZES)
def test_each_code(isa, threads, outputs, inputs, unit):
    plain = make(outputs, inputs, unit)
    packed = floats.pack_for_device(plain)
    assert isinstance(packed, e4m3_cpu.Packed) and (packed.inputs, packed.unit) == (inputs, unit)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(linear.dequantize(packed, dtype), linear.dequantize(plain, dtype))
    assert torch.equal(linear.dequantize(packed, first=16, last=30), linear.dequantize(plain, first=16, last=30))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs, inputs, unit", SIZES)
def test_linear(isa, threads, called, dtype, outputs, inputs, unit):
    packed = floats.pack_for_device(make(outputs, inputs, unit))
    weight = linear.dequantize(packed).double()
    for rows in (1, 2, 7, 11):
        x = torch.randn(rows, inputs + 5).to(dtype)[:, :inputs]
        for bias in (None, torch.randn(outputs).to(dtype)):
            want = x.double() @ weight.t() + (0 if bias is None else bias.double())
            bound = 1e-5 if dtype == torch.float32 else 8e-3
            torch.testing.assert_close(linear.linear(x, packed, "", bias).double(), want, atol=bound, rtol=bound)
    assert "e4m3_linear_f32" in called or "e4m3_linear_bf16" in called


@pytest.mark.parametrize("rows", [3, e4m3_cpu.MAX_ROWS + 1])
def test_gated(isa, rows, monkeypatch):
    """Many rows: panels of the weight."""
    packed = floats.pack_for_device(make(70, 200, 8))
    monkeypatch.setitem(linear.PANEL, "cpu", 16 * 200)
    x = torch.randn(rows, 200)
    want = gated_activation_reference(x @ linear.dequantize(packed).t(), "silu")
    torch.testing.assert_close(linear.linear(x, packed, "silu"), want, atol=1e-4, rtol=1e-4)


def test_what_has_no_numbers_stays_as_it_is():
    codes = torch.tensor([[127, 1, 2, 3]], dtype=torch.uint8)
    plain = floats.pack(codes, torch.ones(1, 1))
    assert floats.pack_for_device(plain) is plain and linear.dequantize(plain).isnan().sum() == 1
    odd = make(4, 42, 42)
    assert floats.pack_for_device(odd) is odd
