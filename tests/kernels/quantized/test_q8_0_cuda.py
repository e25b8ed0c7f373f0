"""q8_0's layout on GPUs."""

import pytest
import torch

from . import layouts


def make(outputs, inputs, seed=0):
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8, generator=draw)
    return codes, (torch.rand(outputs, inputs // 32, generator=draw) / 64 - 1 / 128).half()


@pytest.mark.parametrize("outputs, inputs", [(16, 32), (1, 32), (48, 96), (37, 4096)])
def test_pack_and_back(outputs, inputs):
    codes, scales = make(outputs, inputs)
    packed = layouts.q8_0(codes, scales)
    assert packed.tiles.shape == (-(-outputs // 16), inputs // 32, 544) and packed.inputs == inputs
    assert packed.tiles.is_contiguous()
    found = [*packed.numbers().values()]
    assert torch.equal(found[0].view(torch.int8), codes) and torch.equal(found[1], scales)


def test_where_a_lane_finds_its_codes():
    """Codes lie as the head of q8_0.cuh says, and as the tensor cores' first operand asks for (PTX ISA,
    mma.m16n8k16)."""
    codes, scales = make(32, 96)
    packed = layouts.q8_0(codes, scales)
    for n_tile in range(2):
        for group in range(3):
            packed_tile = packed.tiles[n_tile, group]
            for lane in range(32):
                g, t = divmod(lane, 4)
                words = (packed_tile[lane * 16 : lane * 16 + 16].view(4, 4).int() - 128).tolist()
                for s in range(2):
                    for h in range(2):
                        row = codes[n_tile * 16 + g + 8 * h, group * 32 + 16 * s :]
                        want = [row[2 * t + i].item() for i in (0, 8, 1, 9)]
                        assert words[2 * s + h] == want
                pair = packed_tile[512 + 4 * g : 516 + 4 * g].view(torch.float16)
                assert torch.equal(pair, scales[[n_tile * 16 + g, n_tile * 16 + g + 8], group])
