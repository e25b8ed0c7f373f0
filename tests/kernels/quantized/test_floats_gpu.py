"""Weights of 8 and 4 bits on a GPU, beside the reference."""

import pytest
import torch
from phalanx.kernels.quantized import floats, linear
from phalanx.kernels.quantized.floats import Floats

from ...devices import require_gpu
from .floats_cases import SIZES, as_multiplied, make

require_gpu()
WEIGHTS = [*SIZES, (4096, 4096, 128)]


def on_gpu(packed):
    """The weight as it is stored, and packed where it can be."""
    plain = Floats(*(one.cuda() for one in packed))
    return list({id(one): one for one in (plain, floats.pack_for_device(plain))}.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", WEIGHTS)
def test_dequantize(sizes, dtype):
    packed = make(*sizes)
    for one in on_gpu(packed):
        assert torch.equal(linear.dequantize(one, dtype).cpu(), linear.dequantize(packed, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", WEIGHTS)
@pytest.mark.parametrize("rows", [0, 1, 16, 17, 64, 65, 300])
def test_linear(sizes, rows, dtype):
    packed = make(*sizes)
    x, bias = torch.randn(rows, packed.inputs).to(dtype).cuda(), torch.randn(packed.outputs).to(dtype).cuda()
    weight = linear.dequantize(packed, dtype).double().cuda()
    for one in on_gpu(packed):
        want = as_multiplied(x, one) @ weight.t() + bias.double()
        scale = max(1.0, float(want.std())) if rows else 1.0
        y = linear.linear(x, one, bias=bias)
        torch.testing.assert_close(y.double() / scale, want / scale, atol=3e-2, rtol=3e-2)
