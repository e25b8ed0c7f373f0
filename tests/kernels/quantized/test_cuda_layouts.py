"""Packed layouts on GPUs: what is packed comes back. That lanes find it is test_packed_gemm.py's test_dequantize."""

import pytest
import torch
from phalanx.kernels.quantized import cuda_layouts, floats, mxfp4
from phalanx.kernels.quantized.linear import dequantize

from . import layouts


def random(high, outputs, inputs, dtype=torch.uint8):
    return torch.randint(0, high, (outputs, inputs), dtype=dtype, generator=torch.Generator().manual_seed(high))


@pytest.mark.parametrize("outputs, inputs", [(16, 32), (1, 32), (37, 4096)])
@pytest.mark.parametrize("pack, dtype, size", [(layouts.q8_0, torch.float16, 544), (layouts.e4m3, torch.float32, 576)])
def test_codes_of_8_bits(pack, dtype, size, outputs, inputs):
    codes, scales = random(256, outputs, inputs), torch.rand(outputs, inputs // 32).to(dtype)
    packed = pack(codes, scales)
    assert packed.tiles.shape == (-(-outputs // 16), inputs // 32, size) and packed.inputs == inputs
    assert packed.tiles.is_contiguous() and all(map(torch.equal, packed.numbers().values(), (codes, scales)))


@pytest.mark.parametrize(
    "outputs, inputs, group, zeros, size",
    [(16, 64, 64, False, 544), (1, 64, 32, True, 608), (37, 384, 128, True, 560), (40, 192, 32, False, 576)],
)
def test_int4(outputs, inputs, group, zeros, size):
    codes, scales = random(16, outputs, inputs), torch.rand(outputs, inputs // group).half()
    at = random(17, *scales.shape, torch.int16) if zeros else torch.full(scales.shape, 8, dtype=torch.int16)
    packed = cuda_layouts.pack_int4(codes, scales, at)
    assert packed.tiles.shape == (-(-outputs // 16), inputs // 64, size) and packed.layout.bytes == size
    found, *tables = packed.numbers().values()
    assert len(tables) == 1 + zeros and torch.equal(found, codes)
    for one, want in zip(tables, (scales, at), strict=False):
        assert torch.equal(one.to(want.dtype), want.repeat_interleave(max(group // 64, 1), 1))


@pytest.mark.parametrize("outputs, inputs", [(16, 64), (1, 64), (37, 384), (20, 128)])
def test_mxfp4(outputs, inputs):
    codes, scales = random(256, outputs, inputs // 2), random(255, outputs, inputs // 32)
    packed = layouts.mxfp4(codes, scales)
    each = torch.stack((codes & 15, codes >> 4), 2).flatten(1)
    assert packed.tiles.shape == (-(-outputs // 16), inputs // 64, 544)
    assert all(map(torch.equal, packed.numbers().values(), (each, scales)))
    assert torch.equal(dequantize(packed), dequantize(floats.pack(codes, scales)))
    cuda = torch.device("cuda")
    assert packed.tiles.nbytes * 8 == round(mxfp4.kept_bits(outputs, inputs, 64, cuda) * outputs * inputs)
    for sizes in ((96, 64), (64, 96)):  # of half a tile in one of both matrices: both become plain
        assert mxfp4.kept_bits(outputs, *sizes, cuda) == 0
