"""GEMMs of 33 to 256 rows with quantised weights in packed tiles on Hopper: their tiles, and which are the fastest."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from .. import jit
from ..device import WHOLE_SHARED
from .packed_layouts import N_TILE

if TYPE_CHECKING:
    from .packed_gemm import Layout

ROWS = range(33, 257)
TILES = ((128, 64), (192, 64), (256, 64), (128, 128), (192, 128), (256, 128), (128, 256))  # outputs and rows
LENGTHS = (256, 128, 64)  # inputs of a chunk
LEAST_STAGES, MAX_STAGES = 3, 16
SPLITS = (1, 2, 4)  # blocks that share a tile


class Grid(NamedTuple):
    """How a GEMM's kernel is launched."""

    blocks: int
    threads: int
    cluster: int = 1  # blocks of one
    box: int = 0  # rows of x that TMA brings at once; 0: the kernel reads x itself


class WgmmaConfig(NamedTuple):
    """The tiles of quantized_wgmma.cu."""

    outputs: int  # of a tile
    rows: int  # of a tile, at most
    inputs: int  # of a chunk
    split: int  # blocks of a cluster that share a tile, each a part of its inputs

    def blocks(self, rows: int, outputs: int) -> int:
        return -(-outputs // self.outputs) * -(-rows // self.rows) * self.split

    def stages(self, layout: Layout) -> tuple[int, int]:
        """Chunks that a block holds at once, and all bytes of its shared memory, as quantized_wgmma.cu lays it out:
        sums take the place of chunks."""
        sums = self.rows * (self.outputs + 4) * 4
        weights = self.outputs // N_TILE * (self.inputs // layout.inputs) * layout.bytes
        stage = -(-(self.rows * self.inputs * 2 + weights) // 1024) * 1024
        count = min((WHOLE_SHARED - 1024) // stage, MAX_STAGES)
        return count, 1024 + max(count * stage, sums)

    def shared(self, rows: int, inputs: int, layout: Layout) -> int:
        return self.stages(layout)[1]

    def sizes(self, rows: int, inputs: int, layout: Layout) -> dict[str, jit.Size]:
        of = dict(ROWS=self.rows, GROUPS=self.outputs // 64, SPLIT=self.split)
        return dict(KC=self.inputs, STAGES=self.stages(layout)[0], **of)

    def grid(self, rows: int, outputs: int, layout: Layout, num_sms: int) -> Grid:
        height = -(-rows // -(-rows // self.rows))
        return Grid(self.blocks(rows, outputs), self.outputs * 2 + 128, self.split, height)


class Costs(NamedTuple):
    """Costs on an H200, mostly in cycles of a multiprocessor. `benchmarks/quantized.py --fit FILE` fits them to times
    of all configs."""

    matmul: float  # outputs times rows a cycle, of 16 inputs
    second_level: float  # bytes a cycle of all multiprocessors from the second-level cache
    second_level_each: float  # and of one
    memory: float  # bytes a cycle of all from memory
    together: float  # how far these overlap: 1 not at all, infinite wholly
    chunk: float  # of each chunk besides
    exchange: float  # of a cluster that shares a tile
    exchanged: float  # sums a cycle that it adds up
    launch: float


COSTS = Costs(
    matmul=145,
    second_level=17500,
    second_level_each=190,
    memory=7600,
    together=1.59,
    chunk=90,
    exchange=119,
    exchanged=6.77,
    launch=7900,
)


def blocks_at_once(cluster: int, num_sms: int) -> int:
    """Blocks that a GPU runs at once, in clusters of so many: an H200 28 clusters of four, not 33, as each lies within
    a part of it (2026-11-23)."""
    return num_sms // cluster * cluster if cluster < 4 else max(num_sms * 7 // 32, 1) * 4


@functools.cache
def choose(rows: int, outputs: int, inputs: int, layout: Layout, gated: bool, num_sms: int) -> WgmmaConfig:
    """The fastest config for these sizes."""
    times = ((time(one, rows, outputs, inputs, layout, num_sms), one) for one in configs(rows, inputs, layout, gated))
    return min(times)[1]


def time(
    config: WgmmaConfig, rows: int, outputs: int, inputs: int, layout: Layout, num_sms: int, costs: Costs = COSTS
) -> float:
    """Cycles on an H200, roughly: of the waves of blocks, each as long as its chunks.

    Of q8_0 and q4_k with 64 and 256 rows of the linears of an 8B Llama (H200, 2026-11-25,
    benchmarks/results/h200-quantized-ways-2026-11-25.jsonl) 169 times are off by 5.7 %, and what it chooses takes 0.2 %
    longer than the fastest, at most 4.7 %. What `--fit` finds is off by 5.4 % and chooses the same.
    """
    row_tiles, at_once = -(-rows // config.rows), blocks_at_once(config.split, num_sms)
    weights = config.outputs * layout.bytes / layout.inputs  # bytes, of 16 inputs

    def wave(count: int) -> float:
        multiplied, widened = config.outputs * config.rows / costs.matmul, config.outputs * layout.widening
        each = max(count / costs.second_level, 1 / costs.second_level_each)
        second_level = (weights + config.rows * 32) * each
        memory = weights * count / row_tiles / costs.memory
        # They overlap, but none of them wholly.
        all_parts = multiplied, widened, second_level, memory
        step = sum(part**costs.together for part in all_parts) ** (1 / costs.together)
        exchange = costs.exchange + config.outputs * config.rows / costs.exchanged if config.split > 1 else 0
        return inputs / config.split * (step / 16 + costs.chunk / config.inputs) + exchange + costs.launch

    whole, rest = divmod(config.blocks(rows, outputs), at_once)
    return whole * wave(at_once) + (wave(rest) if rest else 0)


def configs(rows: int, inputs: int, layout: Layout, gated: bool) -> Iterator[WgmmaConfig]:
    """All that quantized_wgmma.cu takes for these sizes."""
    for outputs, height in TILES:
        if height >= 2 * rows:
            continue
        for split in SPLITS:
            for length in LENGTHS:
                config = WgmmaConfig(outputs, height, length, split)
                even = outputs // (1 + gated) % (4 * split) == 0
                whole = inputs % (length * split) == length % layout.inputs == 0
                if even and whole and config.stages(layout)[0] >= LEAST_STAGES:
                    yield config
