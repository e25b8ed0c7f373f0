"""GEMMs of 33 to 256 rows with quantised weights in pieces on Hopper: their tiles, and which are the fastest."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from .. import jit
from ..activation.activation import gate_sizes
from ..device import WHOLE_SHARED

if TYPE_CHECKING:
    from .pieces_cuda import Layout, Packed

STRIP = 16  # outputs of a piece
ROWS = range(33, 257)
TILES = ((128, 64), (192, 64), (256, 64), (128, 128), (192, 128), (256, 128), (128, 256))  # outputs and rows
LENGTHS = (256, 128, 64)  # inputs of a chunk
LEAST_STAGES, MOST_STAGES = 3, 16
CLUSTERS = ((1, 1), (2, 1), (4, 1), (1, 2))  # blocks that share a tile, and that share x
# Two parts were timed of 256 rows (H200, 2026-11-25). Of these every config has as many tiles of rows.
PARTS_ROWS = range(193, 257)
# Of the time of one config, by the model, below which two parts are taken. Of gate and up of an 8B Llama it says 0.943
# where 0.948 was timed of q8_0 (92.8 us, 88.0), and 0.946 of q4_k: both share most of what the model is off by.
GAIN = 0.95


class WgmmaConfig(NamedTuple):
    """The tiles of quantized_wgmma.cu."""

    outputs: int  # of a tile
    rows: int  # of a tile, at most
    inputs: int  # of a chunk
    split: int  # blocks of a cluster that share a tile, each a part of its inputs
    share: int = 1  # blocks of a cluster that have tiles of the same rows, and x together

    def blocks(self, rows: int, outputs: int) -> int:
        tiles = -(-outputs // (self.outputs * self.share)) * self.share
        return tiles * -(-rows // self.rows) * self.split


class WgmmaParts(NamedTuple):
    """Two launches: of as many outputs as make whole waves of blocks with large tiles, and of the rest. Both
    without clusters, as measured."""

    first: WgmmaConfig
    columns: int  # of y, that are the first's
    rest: WgmmaConfig


class Costs(NamedTuple):
    """Of an H200, mostly in cycles of a multiprocessor. `benchmarks/quantized.py --fit FILE` fits them to times of all
    configs."""

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
    """That a GPU takes, of clusters of so many: an H200 28 clusters of four, not 33, as each lies within a part of it
    (2026-11-23)."""
    return num_sms // cluster * cluster if cluster < 4 else max(num_sms * 7 // 32, 1) * 4


@functools.cache
def choose(rows: int, outputs: int, inputs: int, layout: Layout, gated: bool, num_sms: int) -> WgmmaConfig | WgmmaParts:
    """The fastest config for these sizes."""

    def of(config: WgmmaConfig, outputs: int) -> float:
        return time(config, rows, outputs, inputs, layout, num_sms)

    alone, best = min((of(config, outputs), config) for config in configs(rows, inputs, layout, gated))
    if rows not in PARTS_ROWS:
        return best
    limit, found = GAIN * alone, None
    for config in parts(rows, outputs, inputs, layout, gated, num_sms):
        first = config.columns * (1 + gated)
        both = of(config.first, first) + of(config.rest, outputs - first)
        if both < limit:
            limit, found = both, config
    return found or best


def parts(rows: int, outputs: int, inputs: int, layout: Layout, gated: bool, num_sms: int) -> Iterator[WgmmaParts]:
    """By each config of the first launch, with the fastest of the second."""
    alone = [config for config in configs(rows, inputs, layout, gated) if config.split * config.share == 1]
    for config in alone:
        row_tiles = -(-rows // config.rows)
        wave = num_sms // row_tiles * config.outputs  # outputs of a whole one
        first = outputs // wave * wave
        if num_sms % row_tiles == 0 and 0 < first < outputs:
            _, rest = min((time(one, rows, outputs - first, inputs, layout, num_sms), one) for one in alone)
            yield WgmmaParts(config, first // (1 + gated), rest)


def time(
    config: WgmmaConfig, rows: int, outputs: int, inputs: int, layout: Layout, num_sms: int, costs: Costs = COSTS
) -> float:
    """Cycles on an H200, roughly: of the waves of blocks, each as long as its chunks.

    Of q8_0 and q4_k with 64 and 256 rows of the linears of an 8B Llama (H200, 2026-11-25,
    benchmarks/results/h200-quantized-ways-2026-11-25.jsonl) 169 times are off by 5.7 %, and what it chooses takes 0.2 %
    longer than the fastest, at most 4.7 %. What `--fit` finds is off by 5.4 % and chooses the same.
    """
    row_tiles, at_once = -(-rows // config.rows), blocks_at_once(config.split * config.share, num_sms)
    weights = config.outputs * layout.bytes / layout.inputs  # bytes, of 16 inputs

    def wave(count: int) -> float:
        multiplied, widened = config.outputs * config.rows / costs.matmul, config.outputs * layout.widening
        each = max(count / costs.second_level, 1 / costs.second_level_each)
        second_level = (weights + config.rows * 32 / config.share) * each
        memory = weights * count / row_tiles / costs.memory
        # They overlap, but none of them wholly.
        all_parts = multiplied, widened, second_level, memory
        step = sum(part**costs.together for part in all_parts) ** (1 / costs.together)
        exchange = costs.exchange + config.outputs * config.rows / costs.exchanged if config.split > 1 else 0
        return inputs / config.split * (step / 16 + costs.chunk / config.inputs) + exchange + costs.launch

    whole, rest = divmod(config.blocks(rows, outputs), at_once)
    return whole * wave(at_once) + (wave(rest) if rest else 0)


def configs(rows: int, inputs: int, layout: Layout, gated: bool) -> Iterator[WgmmaConfig]:
    """All that `gemm` takes for these sizes."""
    for outputs, height in TILES:
        if height >= 2 * rows:
            continue
        for split, share in CLUSTERS:
            for length in LENGTHS:
                config = WgmmaConfig(outputs, height, length, split, share)
                even = outputs // (1 + gated) % (4 * split) == length // 64 % share == 0
                whole = inputs % (length * split) == length % layout.inputs == 0
                if even and whole and stages(config, layout)[0] >= LEAST_STAGES:
                    yield config


def stages(config: WgmmaConfig, layout: Layout) -> tuple[int, int]:
    """Chunks that a block holds at once, and all bytes of its shared memory, as quantized_wgmma.cu lays it out: sums
    take the place of chunks."""
    sums = config.rows * (config.outputs + 4) * 4
    stage = config.rows * config.inputs * 2 + config.outputs // STRIP * (config.inputs // layout.inputs) * layout.bytes
    stage = -(-stage // 1024) * 1024
    count = min((WHOLE_SHARED - 1024) // stage, MOST_STAGES)
    return count, 1024 + max(count * stage, sums)


def gemm(
    x: Tensor,
    packed: Packed,
    config: WgmmaConfig,
    gate: str = "",
    bias: Tensor | None = None,
    y: Tensor | None = None,
    part: tuple[int, int] | None = None,
) -> Tensor:
    """Of any number of rows, on Hopper. part: y's columns from a multiple of 16 on; the others stay as they are."""
    (rows, inputs), outputs = x.shape, packed.outputs
    width = outputs // 2 if gate else outputs
    y = x.new_empty(rows, width) if y is None else y
    begin, end = part or (0, width)
    _, shared = stages(config, packed.layout)
    of = sizes(inputs, config, gate, bias is not None, packed.layout)
    kernel = jit.kernel("quantized_wgmma", "quantized_wgmma", x.dtype, shared, **of)
    height = -(-rows // -(-rows // config.rows))
    of_x = jit.tensor_map(x.data_ptr(), rows, inputs, height, inputs)
    args = of_x, packed.pieces, x if bias is None else bias, y, rows, outputs, height, begin
    blocks, cluster = config.blocks(rows, (end - begin) * (outputs // width)), config.split * config.share
    kernel((blocks, 1, 1), config.outputs * 2 + 128, *args, shared=shared, cluster=cluster)
    return y


def gemm_in_parts(x: Tensor, packed: Packed, config: WgmmaParts, gate: str = "", bias: Tensor | None = None) -> Tensor:
    """As `gemm`, y's columns in two parts."""
    width = packed.outputs // 2 if gate else packed.outputs
    y = gemm(x, packed, config.first, gate, bias, x.new_empty(len(x), width), (0, config.columns))
    return gemm(x, packed, config.rest, gate, bias, y, (config.columns, width))


def sizes(inputs: int, config: WgmmaConfig, gate: str, bias: bool, layout: Layout) -> dict[str, jit.Size]:
    """What quantized_wgmma.cu is compiled for."""
    return dict(
        **layout.constants,
        I=inputs,
        KC=config.inputs,
        STAGES=stages(config, layout)[0],
        ROWS=config.rows,
        GROUPS=config.outputs // 64,
        SPLIT=config.split,
        SHARE=config.share,
        **gate_sizes(gate),
        BIAS=int(bias),
    )
