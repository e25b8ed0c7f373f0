"""Which part of an axis a rank holds, where groups of it stay whole."""

import pytest
from phalanx.rank.model.shard import in_groups


@pytest.mark.parametrize(
    "size, ranks, group, width",
    [
        (2880, 2, 32, 1472),  # whole pieces of 64: 45 groups each would end in the middle of one
        (2880, 8, 32, 384),
        (768, 8, 32, 96),  # pieces would leave two ranks without any
        (704, 2, 32, 352),  # or make parts a tenth longer
        (768, 2, 256, 512),
        (96, 2, 32, 64),
        (90, 2, 32, 45),
    ],
)
def test_groups_and_packed_tiles_stay_whole(size, ranks, group, width):
    parts = [in_groups(size, rank, ranks, group) for rank in range(ranks)]
    assert {part.width for part in parts} == {width}
    assert [n for part in parts for n in range(part.start, part.stop)] == list(range(size))
