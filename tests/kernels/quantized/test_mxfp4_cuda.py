"""MXFP4's layout on GPUs."""

import pytest
import torch
from phalanx.kernels.quantized import floats, mxfp4
from phalanx.kernels.quantized.linear import dequantize

from . import layouts
from .test_int4_cuda import check_words


def make(outputs, inputs):
    draw = torch.Generator().manual_seed(0)
    each = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, generator=draw)
    scales = torch.randint(0, 255, (outputs, inputs // 32), dtype=torch.uint8, generator=draw)
    return each, each[:, ::2] | each[:, 1::2] << 4, scales


@pytest.mark.parametrize("outputs, inputs", [(16, 64), (1, 64), (37, 384)])
def test_pack_and_back(outputs, inputs):
    each, codes, scales = make(outputs, inputs)
    packed = layouts.mxfp4(codes, scales)
    assert packed.tiles.shape == (-(-outputs // 16), inputs // 64, 544) and packed.inputs == inputs
    assert all(map(torch.equal, packed.numbers().values(), (each, scales)))


def test_where_a_lane_finds_its_codes():
    """Codes lie as the head of mxfp4.cuh says."""
    each, codes, scales = make(32, 128)
    packed = layouts.mxfp4(codes, scales)
    for n_tile in range(2):
        for number in range(2):
            packed_tile = packed.tiles[n_tile, number]
            for lane in range(32):
                g = lane // 4
                check_words(packed_tile, lane, each[n_tile * 16 :, number * 64 :])
                own = scales[n_tile * 16 + g :: 8][:2, number * 2 : number * 2 + 2]
                assert packed_tile[512 + 4 * g :][:4].tolist() == own.T.flatten().tolist()


def test_weights_and_their_memory():
    """Outputs that fill no n-tile."""
    _, codes, scales = make(20, 128)
    packed, plain = layouts.mxfp4(codes, scales), dequantize(floats.pack(codes, scales))
    assert torch.equal(dequantize(packed, torch.float32, 16, 20), plain[16:])
    cuda = torch.device("cuda")
    assert packed.tiles.nbytes * 8 == round(mxfp4.kept_bits(20, 128, 64, cuda) * 20 * 128)
    for sizes in ((96, 64), (64, 96)):  # of half a tile in one of both matrices: both become plain
        assert mxfp4.kept_bits(20, *sizes, cuda) == 0
