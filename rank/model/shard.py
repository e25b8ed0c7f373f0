"""Says which part of an axis a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

GROUP = 32  # elements of an axis that quantised formats encode together
PIECE = (
    64  # that kernels for GPUs take together of MXFP4 and of most 4-bit formats: of fewer, others take these, slower
)
LONGER = 17 / 16  # by which whole pieces may make a part longer: of 2880 on two to eight ranks it is 0 to 4 %


@dataclass(frozen=True)
class Shard:
    """`width` entries from `start` of an axis of `size`. Entries past the end are padding: zeros."""

    size: int
    start: int
    width: int

    @property
    def stop(self) -> int:
        """The end of the shard without its padding."""
        return min(self.start + self.width, self.size)


def whole(size: int) -> Shard:
    return Shard(size, 0, size)


def even(size: int, rank: int, ranks: int) -> Shard:
    """Equal widths for all ranks. Where the size does not divide, the last ranks' shards are padded or empty.

    Such an axis is cut between groups, unless ranks are so many that one would get nothing.
    """
    unit = GROUP if size % ranks and size >= GROUP * ranks else 1
    width = -(-size // (unit * ranks)) * unit
    return Shard(size, min(rank * width, size), width)


def spread(size: int, rank: int, ranks: int) -> Shard:
    """Widths as even as possible, without padding: the first ranks have one more where it does not divide."""
    each, more = divmod(size, ranks)
    return Shard(size, rank * each + min(rank, more), each + (rank < more))


def in_groups(size: int, rank: int, ranks: int, group: int = GROUP) -> Shard:
    """Splits evenly, but groups stay whole wherever the size is a multiple of them, and units where that makes no
    rank's part much longer: the last ranks have less to do."""
    units = [one for one in (group, PIECE) if one % group == 0 and whole_groups(size, ranks, one)]
    widths = [-(-size // (unit * ranks)) * unit for unit in units or (1,)]
    width = widths[-1] if widths[-1] <= widths[0] * LONGER else widths[0]
    return Shard(size, min(rank * width, size), width)


def whole_groups(size: int, ranks: int, group: int) -> bool:
    """Whether so many ranks can share an axis without cutting a group."""
    return size % group == 0 and size >= group * ranks


def key_heads(kv_heads: int, rank: int, ranks: int) -> Shard:
    """The key heads of a rank. With fewer key heads than ranks, neighbouring ranks hold copies of the same one."""
    if kv_heads >= ranks:
        return even(kv_heads, rank, ranks)
    return Shard(kv_heads, rank * kv_heads // ranks, 1)


def scaled(shard: Shard, factor: int) -> Shard:
    """A shard of heads as a shard of their elements."""
    return Shard(shard.size * factor, shard.start * factor, shard.width * factor)


def stage_layers(layers: int, stage: int, stages: int) -> range:
    """The layers of a pipeline stage, as even as possible. Later stages get fewer: the last one has the head too."""
    shard = spread(layers, stage, stages)
    return range(shard.start, shard.stop)
