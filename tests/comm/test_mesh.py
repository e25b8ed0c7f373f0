"""Who shares what with whom."""

from phalanx.comm import mesh, threads


def groups(size: int, tp: int, pp: int) -> list[tuple[list[int], list[int]]]:
    """Each rank's tensor and pipe groups as ranks of the world, in the groups' order."""

    def rank(world):
        grid = mesh.build(world, tp, pp)
        return tuple([int(r) for r in group.exchange(world.rank)] for group in (grid.tensor, grid.pipe))

    return threads.run(rank, size)


def test_two_replicas_of_two_stages_of_two():
    found = groups(8, 2, 2)
    assert [tensor for tensor, _ in found] == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5], [6, 7], [6, 7]]
    assert found[0][1] == [2, 0] and found[7][1] == [7, 5]  # the last stage is rank 0's
