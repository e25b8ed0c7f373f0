"""Who shares what with whom."""

import pytest
from phalanx.comm import mesh, threads


def groups(size: int, tp: int, pp: int, ep: int) -> list[tuple[list[int], list[int], list[int]]]:
    """Of each rank: the world's ranks of its tensor, pipe and expert groups, in the groups' order."""

    def rank(world):
        grid = mesh.build(world, tp, pp, ep=ep)
        return tuple([int(r) for r in group.exchange(world.rank)] for group in (grid.tensor, grid.pipe, grid.experts))

    return threads.run(rank, size)


def test_two_replicas_of_two_stages_of_two():
    found = groups(8, 2, 2, 4)
    assert [tensor for tensor, _, _ in found] == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5], [6, 7], [6, 7]]
    assert found[0][1] == [2, 0] and found[7][1] == [7, 5]  # the last stage is rank 0's
    # Ranks 0, 1, 4, 5 hold the same layers, 2, 3, 6, 7 the others.
    first, second = [0, 1, 4, 5], [2, 3, 6, 7]
    assert [experts for _, _, experts in found] == [first if r in first else second for r in range(8)]


@pytest.mark.parametrize(
    "size, tp, ep, want",
    [
        (4, 4, 1, [[0], [1], [2], [3]]),
        (4, 4, 2, [[0, 1], [0, 1], [2, 3], [2, 3]]),
        (4, 2, 2, [[0, 1], [0, 1], [2, 3], [2, 3]]),
        (4, 1, 4, [[0, 1, 2, 3]] * 4),
    ],
)
def test_expert_groups(size, tp, ep, want):
    assert [experts for _, _, experts in groups(size, tp, 1, ep)] == want
