"""Linears of FP8 weights for many rows on Hopper: x becomes e4m3, too, and tensor cores multiply in 8 bits.

Weights have a scale for each 128 inputs or more, and tensor cores add up to 512 that share one before sums are scaled.
x has one for each row: as e4m3 has exponents of its own, one for each 128 inputs, which checkpoints with
`activation_scheme: dynamic` mean (DeepSeek-V3, arXiv 2412.19437, 3.3), would keep more only of what is less than a
28672nd of a row's largest. Fewer rows are bound by memory: x stays as it is there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from .. import jit
from ..device import WHOLE_SHARED, DeviceCaps
from .packed_layouts import N_TILE
from .quantized_wgmma import Grid, blocks_at_once

if TYPE_CHECKING:
    from .packed_gemm import Layout

HEADER = "e4m3_wide"  # of the format
UNIT = 128  # inputs of a packed tile, and of a chunk
TILE_BYTES = N_TILE * (UNIT + 4)  # of a packed tile
LEAST_ROWS = 33
TILES = (  # outputs and rows of a tile, and rows of a matmul; split and over
    ((64, 64, 64), ((1, 1), (2, 1))),
    ((128, 64, 64), ((1, 1), (2, 1))),
    ((256, 64, 64), ((1, 1),)),
    ((128, 128, 128), ((1, 1), (2, 1), (1, 2))),
    ((128, 192, 192), ((1, 1), (1, 2))),
    ((128, 256, 128), ((1, 1), (1, 2))),
)
MANY_ROWS = 512  # for which tiles of 64 rows are no choice
# The tile that reads shared memory least is chosen where a GPU's power is the bound, whatever `time` estimates. Beside
# the fastest tile of each, timed alone, the 8B model's linears of 8192 rows lose 1 to 2 % by it, and of 2048 up to 2.5
# %, one of them 9 % (H200, 2026-11-27, h200-fp8-ways-2026-11-27.jsonl).
LARGE_ROWS, LARGE_WAVES = 2048, 2
SHARED_ROWS = 4096  # from which on weights with a scale for each 128 inputs are brought to two tiles at once
LEAST_STAGES, MAX_STAGES = 3, 8


class E4m3Config(NamedTuple):
    """The tiles of e4m3_wgmma.cu."""

    outputs: int  # of a tile
    rows: int  # of a tile, at most
    split: int  # blocks of a cluster that share a tile, each a part of its inputs
    share: int = 1  # tiles of a cluster that have rows in common: of experts alone
    over: int = 1  # tiles of a cluster that have weights in common
    matmul: int = 0  # rows of a matmul; 0: the tile's, at most 128

    @property
    def n(self) -> int:
        return self.matmul or min(self.rows, 128)

    @property
    def cluster(self) -> int:
        return self.split * self.share * self.over

    def run(self, alike: int) -> int:
        """Chunks that tensor cores add up, as in e4m3_ring.cuh."""
        return min(alike, 2 if self.rows > self.n else 4)

    def height(self, rows: int) -> int:
        """Rows of a tile, about as many in each, a multiple of 4."""
        return -(-rows // (4 * -(-rows // self.rows))) * 4

    def row_tiles(self, rows: int) -> int:
        """Some of them may have no row."""
        return -(-rows // (self.height(rows) * self.over)) * self.over

    def blocks(self, rows: int, outputs: int) -> int:
        """One for each tile, and each part of its inputs."""
        return -(-outputs // self.outputs) * self.row_tiles(rows) * self.split

    def stages(self) -> tuple[int, int]:
        """Chunks that a block holds at once, and all bytes of its shared memory, as e4m3_wgmma.cu lays it out."""
        weights = self.outputs // N_TILE * TILE_BYTES
        stage = -(-(self.rows * UNIT + weights) // 1024) * 1024
        count = min((WHOLE_SHARED - 1024) // stage, MAX_STAGES)
        assert count >= LEAST_STAGES
        sums = self.rows * (self.outputs + 4) * 4 if self.split > 1 else 0
        return count, 1024 + max(count * stage, sums)

    def shared(self, rows: int, inputs: int, layout: Layout) -> int:
        return self.stages()[1]

    def sizes(self, rows: int, inputs: int, layout: Layout) -> dict[str, jit.Size]:
        of = dict(ROWS=self.rows, N=self.n, GROUPS=self.outputs // 64, ALIKE=layout.alike)
        return dict(STAGES=self.stages()[0], SPLIT=self.split, SHARE=self.share, OVER=self.over, **of)

    def grid(self, rows: int, outputs: int, layout: Layout, num_sms: int) -> Grid:
        blocks = self.blocks(rows, outputs)
        if self.split == 1:  # a cluster goes on to further tiles
            blocks = min(blocks, blocks_at_once(self.cluster, num_sms))
        return Grid(blocks, self.outputs * 2 + 128, self.cluster, self.height(rows))


def chosen(rows: int, layout: Layout, caps: DeviceCaps) -> bool:
    """Whether these are the format, the rows and the GPU for it."""
    return takes(layout) and caps.hopper and rows >= LEAST_ROWS


def takes(layout: Layout) -> bool:
    """Whether tensor cores of 8 bits multiply these weights."""
    return layout.header == HEADER and not layout.weight_only


@functools.cache
def choose(rows: int, outputs: int, inputs: int, layout: Layout, gated: bool, num_sms: int) -> E4m3Config:
    """The fastest config for these sizes, by a model of waves of blocks."""
    alike, found = layout.alike, list(configs(rows, inputs, layout.alike, gated))
    if (large := large_config(rows, outputs, alike, num_sms)) in found:
        return large
    return min(found, key=lambda config: time(config, rows, outputs, inputs, alike, num_sms))


def large_config(rows: int, outputs: int, alike: int, num_sms: int) -> E4m3Config | None:
    """For many rows and many tiles, where the GPU's power is the bound."""
    config = E4m3Config(128, 192, 1, over=2 if alike == 1 and rows >= SHARED_ROWS else 1, matmul=192)
    return config if rows >= LARGE_ROWS and config.blocks(rows, outputs) >= LARGE_WAVES * num_sms else None


def configs(rows: int, inputs: int, alike: int, gated: bool) -> Iterator[E4m3Config]:
    """All that e4m3_wgmma.cu takes for these sizes and that may be the fastest."""
    for (outputs, height, matmul), clusters in TILES:
        if height >= 2 * max(rows, 65) or (rows > MANY_ROWS and height == 64):
            continue
        for split, over in clusters:
            config = E4m3Config(outputs, height, split, over=over, matmul=matmul)
            even = outputs // (1 + gated) % (4 * config.split) == 0
            if even and inputs % (UNIT * config.run(alike) * config.split) == 0 and config.over <= -(-rows // height):
                yield config


class Costs(NamedTuple):
    """The cost model of `time`: nanoseconds, and bytes for each of them. `benchmarks/quantized.py --fit`
    finds them in times of every config."""

    multiplied: float  # how much longer than its reads of shared memory, or its tensor cores, a matmul takes
    added: float  # and by how much more, if sums of each chunk are added up
    alone: float  # of chunks that tensor cores add up, for a warpgroup by itself
    row: float  # and of each row
    ingest: float  # bytes of a multiprocessor's shared memory
    second_level: float  # of all of them
    memory: float
    together: float  # how much the longest of them hides the others
    tile: float
    exchange: float  # of a tile that a cluster shares
    exchanged: float  # its sums
    launch: float


# Costs of an H200, fitted to tiles of which several have the same scales; they choose for all as well.
COSTS = Costs(
    multiplied=1.137,
    added=1.15,
    alone=9.18,
    row=0.0517,
    ingest=68.63,
    second_level=7000,
    memory=3206,
    together=8,
    tile=58.88,
    exchange=1484,
    exchanged=10.1,
    launch=1845,
)


def time(
    config: E4m3Config, rows: int, outputs: int, inputs: int, alike: int, num_sms: int, costs: Costs = COSTS
) -> float:
    """Nanoseconds of a GEMM, roughly: of rounds of tiles, each as long as the longest of what its chunks take."""
    at_once, height = blocks_at_once(config.cluster, num_sms), config.height(rows)
    weights, of_x = config.outputs // N_TILE * TILE_BYTES, height * UNIT  # bytes of a chunk
    multiplied = (
        config.outputs / 64 * config.rows / config.n * max(16 + config.n / 4, config.n / 2) * 4 / 1.7 * costs.multiplied
    )
    multiplied *= 1 + costs.added / config.run(alike)
    alone = (costs.alone * config.rows / config.n + costs.row * config.rows) / config.run(alike)

    def wave(count: int) -> float:
        parts = (
            multiplied,
            alone,
            (weights + of_x) / costs.ingest,
            (weights / config.over + of_x) * count / costs.second_level,
            weights * count / config.row_tiles(rows) / costs.memory,
        )
        chunk = sum(part**costs.together for part in parts) ** (1 / costs.together)
        exchange = costs.exchange + config.outputs * config.rows / costs.exchanged if config.split > 1 else 0
        return inputs / UNIT / config.split * chunk + exchange + costs.tile

    whole, rest = divmod(config.blocks(rows, outputs), at_once)
    return costs.launch + whole * wave(at_once) + (wave(rest) if rest else 0)
