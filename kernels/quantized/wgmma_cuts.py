"""How quantized_wgmma.cu cuts a GEMM of 33 to 256 rows on Hopper, and which cut is the fastest."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .pieces_cuda import Layout

STRIP = 16  # outputs of a piece
ROWS = range(33, 257)
TILES = ((128, 64), (192, 64), (256, 64), (128, 128), (192, 128), (256, 128), (128, 256))  # outputs and rows
LENGTHS = (256, 128, 64)  # inputs of a chunk
SHARED = 220 << 10  # bytes of a block: a few small blocks of the kernels before and after fit beside it
LEAST_STAGES, MOST_STAGES = 3, 16
CLUSTERS = ((1, 1), (2, 1), (4, 1), (1, 2))  # blocks that share a tile, and that share x
GAIN = 0.95  # of the time of one cut, below which two parts are taken: the model is off by so much


class WgmmaConfig(NamedTuple):
    """How quantized_wgmma.cu cuts a GEMM."""

    outputs: int  # of a tile
    rows: int  # of a tile, at most
    inputs: int  # of a chunk
    split: int  # blocks of a cluster that share a tile, each a part of its inputs
    share: int = 1  # blocks of a cluster that have tiles of the same rows, and x together

    def blocks(self, rows: int, outputs: int) -> int:
        tiles = -(-outputs // (self.outputs * self.share)) * self.share
        return tiles * -(-rows // self.rows) * self.split


class WgmmaParts(NamedTuple):
    """Two launches: of as many outputs as make whole waves of blocks by a cut with large tiles, and of the rest. Both
    of cuts without clusters, as measured."""

    first: WgmmaConfig
    columns: int  # of y, that are the first's
    rest: WgmmaConfig


@functools.cache
def choose(rows: int, outputs: int, inputs: int, layout: Layout, gated: bool, num_sms: int) -> WgmmaConfig | WgmmaParts:
    """The fastest way for these sizes."""
    all_of_them = list(configs(rows, inputs, layout, gated))

    alone = [cut for cut in all_of_them if cut.split * cut.share == 1]

    def fastest(cuts: list[WgmmaConfig], outputs: int) -> tuple[float, WgmmaConfig]:
        return min((_time(rows, outputs, inputs, layout, num_sms, cut), cut) for cut in cuts)

    time, best = fastest(all_of_them, outputs)
    limit, found = GAIN * time, None
    for cut in alone:
        row_tiles = -(-rows // cut.rows)
        if num_sms % row_tiles:
            continue
        wave = num_sms // row_tiles * cut.outputs  # outputs of a whole one
        if not (some := outputs // wave * wave) or some == outputs:
            continue
        time, rest = fastest(alone, outputs - some)
        time += _time(rows, some, inputs, layout, num_sms, cut)
        if time < limit:
            limit, found = time, WgmmaParts(cut, some // (1 + gated), rest)
    return found or best


def _time(rows: int, outputs: int, inputs: int, layout: Layout, num_sms: int, cut: WgmmaConfig) -> float:
    """Cycles on an H200, roughly: of the waves of blocks, each as long as its chunks.

    Fitted to 334 times of q8_0 and q4_k with 64 and 256 rows of the linears of an 8B Llama (H200, 2026-11-25): they are
    off by 6 %, and what it chooses takes 0.2 % longer than the fastest.
    """
    row_tiles, cluster = -(-rows // cut.rows), cut.split * cut.share
    # An H200 takes 28 clusters of four blocks, but not 32, as one lies within a part of the GPU (2026-11-23).
    at_once = num_sms // cluster * cluster if cluster < 4 else num_sms * 7 // 32 * 4
    weights = cut.outputs * layout.bytes / layout.inputs  # bytes, of 16 inputs

    def wave(count: int) -> float:
        multiplied, widened = cut.outputs * cut.rows / 145, cut.outputs * layout.widening
        second_level = (weights + cut.rows * 32 / cut.share) * max(count / 17500, 1 / 190)
        memory = weights * count / row_tiles / 7600
        # They overlap, but none of them wholly.
        step = sum(part**1.59 for part in (multiplied, widened, second_level, memory)) ** (1 / 1.59)
        exchange = 119 + cut.outputs * cut.rows / 6.77 if cut.split > 1 else 0
        return inputs / cut.split * (step / 16 + 90 / cut.inputs) + exchange + 7900

    whole, rest = divmod(cut.blocks(rows, outputs), at_once)
    return whole * wave(at_once) + (wave(rest) if rest else 0)


def configs(rows: int, inputs: int, layout: Layout, gated: bool) -> Iterator[WgmmaConfig]:
    """All that `pieces_cuda.wgmma` takes for these sizes."""
    for outputs, height in TILES:
        if height >= 2 * rows:
            continue
        for split, share in CLUSTERS:
            for length in LENGTHS:
                cut = WgmmaConfig(outputs, height, length, split, share)
                even = outputs // (1 + gated) % (4 * split) == length // 64 % share == 0
                whole = inputs % (length * split) == length % layout.inputs == 0
                if even and whole and wgmma_stages(cut, layout)[0] >= LEAST_STAGES:
                    yield cut


def wgmma_stages(cut: WgmmaConfig, layout: Layout) -> tuple[int, int]:
    """As `stages`, as quantized_wgmma.cu lays it out: sums take the place of chunks."""
    sums = cut.rows * (cut.outputs + 4) * 4
    stage = cut.rows * cut.inputs * 2 + cut.outputs // STRIP * (cut.inputs // layout.inputs) * layout.bytes
    stage = -(-stage // 1024) * 1024
    count = min((SHARED - 1024) // stage, MOST_STAGES)
    return count, 1024 + max(count * stage, sums)
