"""int4's layout on GPUs."""

import pytest
import torch
from phalanx.kernels.quantized import cuda_layouts


def make(outputs, inputs, group, zeros):
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, generator=draw)
    scales = (torch.rand(outputs, inputs // group, generator=draw) / 8 - 1 / 16).half()
    at = torch.randint(0, 17, scales.shape, dtype=torch.int16, generator=draw) if zeros else torch.full(scales.shape, 8)
    return codes, scales, at.to(torch.int16)


@pytest.mark.parametrize(
    "outputs, inputs, group, zeros, size",
    [(16, 64, 64, False, 544), (1, 64, 32, True, 608), (37, 384, 128, True, 560), (40, 192, 32, False, 576)],
)
def test_pack_and_back(outputs, inputs, group, zeros, size):
    codes, scales, at = make(outputs, inputs, group, zeros)
    packed = cuda_layouts.pack_int4(codes, scales, at)
    assert packed.tiles.shape == (-(-outputs // 16), inputs // 64, size) and packed.inputs == inputs
    assert packed.tiles.is_contiguous() and packed.layout.bytes == size
    found, *tables = packed.numbers().values()
    assert len(tables) == 1 + zeros
    assert torch.equal(found, codes)
    for one, want in zip(tables, (scales, at), strict=False):
        want = want.repeat_interleave(max(group // 64, 1), 1)
        assert torch.equal(one.to(want.dtype), want)


def check_words(packed_tile, lane, codes):
    """Checks that the lane's words have its part of the codes [16, 64] or more, as the tensor cores' first operand asks
    for (PTX ISA, mma.m16n8k16)."""
    g, t = divmod(lane, 4)
    words = packed_tile[lane * 16 : lane * 16 + 16].clone().view(torch.int32).tolist()
    for s, word in enumerate(words):
        for h in range(2):
            row = codes[g + 8 * h, 16 * s :]
            for bit, at in ((0, 0), (16, 1), (8, 8), (24, 9)):
                assert word >> (bit + 4 * h) & 15 == row[2 * t + at]


def test_where_a_lane_finds_its_codes():
    """Codes lie as the head of int4.cuh says."""
    codes, scales, zeros = make(32, 128, 32, True)
    packed = cuda_layouts.pack_int4(codes, scales, zeros)
    for n_tile in range(2):
        for number in range(2):
            packed_tile = packed.tiles[n_tile, number]
            for lane in range(32):
                g = lane // 4
                check_words(packed_tile, lane, codes[n_tile * 16 :, number * 64 :])
                for i in range(2):
                    pair = [n_tile * 16 + g, n_tile * 16 + g + 8], number * 2 + i
                    begin = 512 + 32 * i + 4 * g
                    assert torch.equal(packed_tile[begin : begin + 4].clone().view(torch.float16), scales[pair])
                    begin = 512 + 64 + 16 * i + 2 * g
                    assert torch.equal(packed_tile[begin : begin + 2].short(), zeros[pair])
