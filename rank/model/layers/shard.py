"""Which part of an axis a rank holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """`width` entries of an axis of `size`, from `start`. Where they reach past the end, the rank holds zeros."""

    size: int
    start: int
    width: int

    @property
    def stop(self) -> int:
        """The end of what the axis really has."""
        return min(self.start + self.width, self.size)


def whole(size: int) -> Shard:
    return Shard(size, 0, size)


def even(size: int, rank: int, ranks: int) -> Shard:
    """Equal widths for all ranks; where that does not divide, the last ones are padded, or empty."""
    width = -(-size // ranks)
    return Shard(size, min(rank * width, size), width)


def key_heads(kv_heads: int, rank: int, ranks: int) -> Shard:
    """In heads. With fewer key heads than ranks, neighbours hold the same one, as their query heads share it."""
    if kv_heads >= ranks:
        return even(kv_heads, rank, ranks)
    return Shard(kv_heads, rank * kv_heads // ranks, 1)


def scaled(span: Shard, factor: int) -> Shard:
    """A span of heads, in the heads' elements."""
    return Shard(span.size * factor, span.start * factor, span.width * factor)


def stage_layers(layers: int, stage: int, stages: int) -> range:
    """The layers of a pipeline stage, as even as possible; later stages get fewer, as the last has the head as well."""
    each, more = divmod(layers, stages)
    start = stage * each + min(stage, more)
    return range(start, start + each + (stage < more))
