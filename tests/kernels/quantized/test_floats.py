"""FP8 and MXFP4 weights against their definitions."""

import pytest
import torch
from phalanx.kernels.activation.activation import gated_activation_reference
from phalanx.kernels.quantized import floats, linear

from . import layouts
from .floats_cases import SIZES, make


def e4m3(code):
    """Sign, four bits of exponent, three of mantissa; the bias is 7, and the only NaNs are 0x7f and 0xff."""
    exponent, mantissa = code >> 3 & 15, code & 7
    value = (mantissa / 8) * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2 ** (exponent - 7)
    return -value if code & 128 else value


def test_each_code_of_e4m3():
    codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)[None]
    (got,) = linear.dequantize(floats.pack(codes, torch.full((1, 1), 0.37)))
    want = torch.tensor([e4m3(int(code)) for code in codes[0]]) * torch.tensor(0.37)
    assert torch.equal(got, want)
    assert linear.dequantize(floats.pack(torch.tensor([[127, 255]], dtype=torch.uint8), torch.ones(1, 1))).isnan().all()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("rows", [0, 1, 9])
@pytest.mark.parametrize("gate", ["", "silu"])
def test_linear(sizes, rows, gate, monkeypatch):
    """Panels of a few outputs each."""
    packed = make(*sizes)
    if gate and packed.outputs % 2:
        return
    monkeypatch.setitem(linear.PANEL, "cpu", 17 * packed.inputs)
    x, bias = torch.randn(rows, packed.inputs), torch.randn(packed.outputs)
    want = x.double() @ linear.dequantize(packed).double().t() + bias
    want = gated_activation_reference(want.float(), gate) if gate else want.float()
    torch.testing.assert_close(linear.linear(x, packed, gate, bias), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("outputs, inputs, unit", [(16, 32, 32), (37, 384, 128), (40, 192, 64), (1, 96, 96)])
def test_packed_tiles_of_gpus_and_back(outputs, inputs, unit):
    plain = make(outputs, inputs, unit)
    by = plain.scales.repeat_interleave(unit // 32, 1)
    packed = layouts.e4m3(plain.codes, by)
    assert packed.tiles.shape == (-(-outputs // 16), inputs // 32, 576) and packed.inputs == inputs
    codes, scales = packed.numbers().values()
    assert torch.equal(codes, plain.codes) and torch.equal(scales, by)
    assert torch.equal(linear.dequantize(packed), linear.dequantize(plain))


def test_what_stays_as_it_is_stored():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert floats.kept_bits(256, 128, cpu) == 8.25 and floats.kept_bits(256, 128, cuda) == 8.25
    assert floats.kept_bits(192, 64, cuda) == 9
    assert floats.kept_bits(100, 4, cuda) == 0  # no packed tiles of so few inputs: plain


def test_a_part_of_the_outputs_and_of_the_experts():
    packed = make(48, 64, 32, pairs=True)
    whole = linear.dequantize(packed)
    assert torch.equal(linear.dequantize(packed, torch.float32, 16, 40), whole[16:40])
    assert packed.shape == (48, 64) and packed.unit == 32
    both = floats.Floats(*(torch.stack((one, one.flip(0))) for one in packed))
    assert torch.equal(linear.dequantize(both.expert(1)), whole.flip(0)) and both.shape == (2, 48, 64)
    assert torch.equal(both.plain(torch.bfloat16), torch.stack((whole, whole.flip(0))).bfloat16())
