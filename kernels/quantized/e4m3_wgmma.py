"""Linears of FP8 weights for many rows on Hopper: x becomes e4m3, too, and tensor cores multiply in 8 bits.

Weights have a scale for each 128 inputs or more, and tensor cores add up to 512 that share one before sums are scaled.
x has one for each row: as e4m3 has exponents of its own, one for each 128 inputs, which checkpoints with
`activation_scheme: dynamic` mean (DeepSeek-V3, arXiv 2412.19437, 3.3), would keep more only of what is less than a
28672nd of a row's largest. Fewer rows are bound by memory: x stays as it is there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import jit
from ..activation.activation import gate_sizes, gated_activation
from ..device import WHOLE_SHARED, DeviceCaps, device_caps
from . import e4m3_rows, e4m3_wide
from .e4m3_rows import E4m3Rows
from .pieces_cuda import STRIP, Packed, takes
from .quantized_wgmma import blocks_at_once

UNIT = 128  # inputs of a piece, and of a chunk
LEAST_ROWS = 33
TILES = (  # outputs and rows of a tile, and rows of a matmul; split, share and over
    ((64, 64, 64), ((1, 1, 1), (2, 1, 1), (1, 2, 1))),
    ((128, 64, 64), ((1, 1, 1), (2, 1, 1), (1, 2, 1))),
    ((192, 64, 64), ((1, 1, 1), (2, 1, 1), (4, 1, 1))),
    ((256, 64, 64), ((1, 1, 1), (2, 1, 1))),
    ((128, 128, 128), ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2))),
    ((192, 128, 128), ((1, 1, 1), (1, 2, 1), (1, 1, 2))),
    ((192, 128, 64), ((1, 1, 1), (1, 1, 2))),
    ((128, 192, 96), ((1, 1, 1), (1, 2, 1), (1, 1, 2))),
    ((128, 192, 192), ((1, 1, 1), (1, 2, 1), (1, 1, 2))),
    ((128, 256, 128), ((1, 1, 1), (1, 2, 1), (1, 1, 2))),
    ((128, 256, 64), ((1, 1, 1), (1, 2, 1), (1, 1, 2))),
)
MANY_ROWS = 512  # for which tiles of 64 rows are no choice
# Where a GPU's power is the bound, the tile that reads shared memory least is chosen, whatever `time` says. Beside the
# fastest tile of each, timed alone, the 8B model's linears of 8192 rows lose 1 to 2 % by it, and of 2048 up to 2.5 %,
# one of them 9 % (H200, 2026-11-27, h200-fp8-ways-2026-11-27.jsonl).
LARGE_ROWS, LARGE_WAVES = 2048, 2
SHARED_ROWS = 4096  # from which on weights with a scale for each 128 inputs are brought to two tiles at once
LEAST_STAGES, MOST_STAGES = 3, 8


class E4m3Config(NamedTuple):
    """The tiles of e4m3_wgmma.cu."""

    outputs: int  # of a tile
    rows: int  # of a tile, at most
    split: int  # blocks of a cluster that share a tile, each a part of its inputs
    share: int = 1  # tiles of a cluster that have rows in common
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
        """Rows of a tile, about as many in each: multiples of 4, and of 8 for shares of x."""
        unit = 16 if self.share > 1 else 4
        return -(-rows // (unit * -(-rows // self.rows))) * unit

    def row_tiles(self, rows: int) -> int:
        """Some of them may have no row."""
        return -(-rows // (self.height(rows) * self.over)) * self.over

    def blocks(self, rows: int, outputs: int) -> int:
        """One for each tile, and each part of its inputs."""
        return -(-outputs // (self.outputs * self.share)) * self.share * self.row_tiles(rows) * self.split


def chosen(rows: int, packed: object, found: DeviceCaps) -> bool:
    """Whether these are the weights, the rows and the GPU for it."""
    if not isinstance(packed, Packed) or packed.layout.header != e4m3_wide.LAYOUT.header:
        return False
    return found.hopper and rows >= LEAST_ROWS


def supports(x: Tensor, packed: object, bias: Tensor | None = None) -> bool:
    """Whether `linear` takes x [T, I], in e4m3, and bias [O], and is the fastest kernel."""
    return isinstance(packed, Packed) and takes(x, packed, bias) and chosen(len(x), packed, device_caps(x.device))


def linear(x: E4m3Rows, packed: Packed, gate: str = "", bias: Tensor | None = None) -> Tensor:
    """x [T, I] times the transpose of the weight [O, I], plus bias [O].

    gate: an activation of the first half of the outputs times the second half; "": the outputs as they are.
    """
    fused = gate if packed.outputs % (2 * STRIP) == 0 else ""
    rows, found = len(x.codes), device_caps(x.codes.device)
    config = choose(rows, packed.outputs, packed.inputs, packed.layout.alike, bool(fused), found)
    y = gemm(x, packed, config, fused, bias)
    return y if fused == gate else gated_activation(y, gate)


def variants(
    rows: Iterable[int], packed: object, dtype: torch.dtype, gate: str, bias: bool, found: DeviceCaps
) -> Iterator[jit.KernelVariant]:
    """What the GEMM of so many rows, each, is compiled as."""
    for n in rows:
        assert isinstance(packed, Packed)
        fused = gate if packed.outputs % (2 * STRIP) == 0 else ""
        config = choose(n, packed.outputs, packed.inputs, packed.layout.alike, bool(fused), found)
        yield jit.variant("e4m3_rows", dtype, **e4m3_rows.sizes(packed.inputs))
        yield jit.variant("e4m3_wgmma", dtype, **sizes(packed.inputs, config, fused, bias, packed.layout.alike))


@functools.cache
def choose(rows: int, outputs: int, inputs: int, alike: int, gated: bool, found: DeviceCaps) -> E4m3Config:
    """The fastest config for these sizes, by a model of waves of blocks. alike: as Layout has it."""
    found_configs = list(configs(rows, inputs, alike, gated))
    if (large := large_config(rows, outputs, alike, found.num_sms)) in found_configs:
        return large
    costs = LONG_COSTS if alike > 1 else COSTS

    def of(config: E4m3Config) -> float:
        return time(config, rows, outputs, inputs, alike, found.num_sms, costs)

    return min(found_configs, key=of)


def large_config(rows: int, outputs: int, alike: int, num_sms: int) -> E4m3Config | None:
    """For many rows and many tiles, where the GPU's power is the bound."""
    config = E4m3Config(128, 192, 1, over=2 if alike == 1 and rows >= SHARED_ROWS else 1, matmul=192)
    return config if rows >= LARGE_ROWS and config.blocks(rows, outputs) >= LARGE_WAVES * num_sms else None


def configs(rows: int, inputs: int, alike: int, gated: bool) -> Iterator[E4m3Config]:
    """All that `gemm` takes for these sizes and that may be the fastest."""
    for (outputs, height, matmul), clusters in TILES:
        if height >= 2 * max(rows, 65) or (rows > MANY_ROWS and height == 64):
            continue
        for cluster in clusters:
            config = E4m3Config(outputs, height, *cluster, matmul)
            even = outputs // (1 + gated) % (4 * config.split) == 0
            if even and inputs % (UNIT * config.run(alike) * config.split) == 0 and config.over <= -(-rows // height):
                yield config


class Costs(NamedTuple):
    """What `time` reckons with: nanoseconds, and bytes for each of them. `benchmarks/quantized.py --fit`
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


# Of an H200.
COSTS = Costs(
    multiplied=1.486,
    added=0,
    alone=8.018,
    row=0.0719,
    ingest=65.09,
    second_level=7000,
    memory=3362,
    together=8,
    tile=309.9,
    exchange=1106,
    exchanged=7.363,
    launch=1783,
)
# Of pieces with the same scales, of an H200.
LONG_COSTS = Costs(
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


def time(config: E4m3Config, rows: int, outputs: int, inputs: int, alike: int, num_sms: int, costs: Costs) -> float:
    """Nanoseconds of a GEMM, roughly: of rounds of tiles, each as long as the longest of what its chunks take."""
    at_once, height = blocks_at_once(config.cluster, num_sms), config.height(rows)
    weights, of_x = config.outputs // STRIP * e4m3_wide.PIECE, height * UNIT  # bytes of a chunk
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
            (weights / config.over + of_x / config.share) * count / costs.second_level,
            weights * count / config.row_tiles(rows) / costs.memory,
        )
        chunk = sum(part**costs.together for part in parts) ** (1 / costs.together)
        exchange = costs.exchange + config.outputs * config.rows / costs.exchanged if config.split > 1 else 0
        return inputs / UNIT / config.split * chunk + exchange + costs.tile

    whole, rest = divmod(config.blocks(rows, outputs), at_once)
    return costs.launch + whole * wave(at_once) + (wave(rest) if rest else 0)


def gemm(x: E4m3Rows, packed: Packed, config: E4m3Config, gate: str = "", bias: Tensor | None = None) -> Tensor:
    codes, scales, dtype = x
    (rows, inputs), outputs = codes.shape, packed.outputs
    height = config.height(rows)
    y = codes.new_empty(rows, outputs // 2 if gate else outputs, dtype=dtype)
    _, shared = stages(config)
    variant = sizes(inputs, config, gate, bias is not None, packed.layout.alike)
    kernel = jit.kernel("e4m3_wgmma", "e4m3_wgmma", dtype, shared, **variant)
    of_x = jit.tensor_map(
        codes.data_ptr(), rows, inputs // 2, height // config.share, inputs // 2
    )  # in elements of two bytes
    args = of_x, scales, packed.pieces, y if bias is None else bias, y, rows, outputs, height
    blocks = config.blocks(rows, outputs)
    if config.split == 1:  # a cluster goes on to further tiles
        blocks = min(blocks, blocks_at_once(config.cluster, device_caps(codes.device).num_sms))
    kernel((blocks, 1, 1), config.outputs * 2 + 128, *args, shared=shared, cluster=config.cluster)
    return y


def stages(config: E4m3Config) -> tuple[int, int]:
    """Chunks that a block holds at once, and all bytes of its shared memory, as e4m3_wgmma.cu lays it out."""
    weights = config.outputs // STRIP * e4m3_wide.PIECE
    stage = -(-(config.rows * UNIT + weights) // 1024) * 1024
    count = min((WHOLE_SHARED - 1024) // stage, MOST_STAGES)
    assert count >= LEAST_STAGES
    sums = config.rows * (config.outputs + 4) * 4 if config.split > 1 else 0
    return count, 1024 + max(count * stage, sums)


def sizes(inputs: int, config: E4m3Config, gate: str, bias: bool, alike: int) -> dict[str, jit.Size]:
    """What e4m3_wgmma.cu is compiled for."""
    return dict(
        I=inputs,
        ALIKE=alike,
        STAGES=stages(config)[0],
        ROWS=config.rows,
        N=config.n,
        GROUPS=config.outputs // 64,
        SPLIT=config.split,
        SHARE=config.share,
        OVER=config.over,
        **gate_sizes(gate),
        BIAS=int(bias),
    )
