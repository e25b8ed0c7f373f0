"""Quantised experts on any GPU, in tiles of 8 to 64 pairs."""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import Tensor

from .. import jit
from ..quantized.pieces_cuda import STRIP, Layout
from ..quantized.quantized_gemv import LARGE
from ..quantized.stack import Stack
from . import quantized_pipeline
from .group import Groups

# Most pairs per expert → tiles of 8 rows of a block; of more it has 8. moe.tiling_rows has the same borders.
TILES = {4: 1, 8: 2, 24: 4}
WARPS = 8
WHOLE = 32 << 10  # elements of x that lie in shared memory at once
CHUNK = 8 << 10  # or so many twice, which threads have in their registers on the way


class ExpertTileConfig(NamedTuple):
    """The tile of a block of quantized_experts.cu, and how its warps share it."""

    tiles: int  # of 8 rows
    groups: int  # of warps that share a strip
    inputs: int  # of a chunk of x
    ahead: int  # pieces of a strip that a warp has under way

    @property
    def rows(self) -> int:
        return 8 * self.tiles


def choose_tiles(pairs: int, experts: int) -> int:
    """Tiles of 8 rows of a block, for so many pairs of all experts."""
    return next((tiles for most, tiles in TILES.items() if pairs <= most * experts), 8)


@functools.cache
def choose(tiles: int, inputs: int, layout: Layout, gated: bool) -> ExpertTileConfig:
    """For so many tiles of rows: few of them leave warps to share a strip, many want strips to share x."""
    rows, span = 8 * tiles, layout.streamed or layout.inputs
    groups = next(n for n in (8, 4, 2, 1) if n * tiles <= WARPS and inputs % (span * n) == 0)
    if rows * inputs <= WHOLE:
        length = inputs
    else:
        while not (lengths := _lengths(inputs, span * groups, CHUNK // rows)):
            groups //= 2
        length = lengths[-1]
    steps = length // span // groups
    most = 2 if layout.bytes * span // layout.inputs > LARGE or (gated and tiles == 8) else 4
    even = [n for n in (4, 2, 1) if n <= most and (length == inputs or steps % n == 0)]
    return ExpertTileConfig(tiles, groups, length, even[0])


def _lengths(inputs: int, unit: int, most: int) -> list[int]:
    """Multiples of `unit` up to `most` that divide the inputs."""
    return [n for n in range(unit, most + 1, unit) if inputs % n == 0]


def shared(config: ExpertTileConfig, inputs: int, gated: bool) -> int:
    """Bytes of shared memory, as quantized_experts.cu lays it out."""
    buffers = 1 if config.inputs == inputs else 2
    sums = WARPS * (1 + gated) * STRIP * (config.rows + 1) * 4
    return max(buffers * config.rows * (config.inputs * 2 + 16), sums)


def sizes(stack: Stack, config: ExpertTileConfig, act: str, top: int, bias: bool) -> dict[str, jit.Size]:
    """What quantized_experts.cu is compiled for. act: of the gate; "": there is none."""
    return quantized_pipeline.sizes_of_gemm(stack, act, top, bias) | dict(
        TILES=config.tiles, SUBS=WARPS // config.groups, GROUPS=config.groups, KC=config.inputs, AHEAD=config.ahead
    )


def launch(
    x: Tensor, stack: Stack, groups: Groups, weights: Tensor, y: Tensor, act: str, top: int, config: ExpertTileConfig,
    bias: Tensor | None,
) -> None:  # fmt: skip
    """As `quantized_cuda.expert_up`, with an activation, or `expert_down` make y."""
    memory = shared(config, stack.shape[2], bool(act))
    of = sizes(stack, config, act, top, bias is not None)
    kernel = jit.kernel("quantized_experts", "quantized_experts", x.dtype, memory, **of)
    blocks = -(-y.shape[1] // (STRIP * (WARPS // config.groups)))
    args = x, stack.packed.pieces, x if bias is None else bias, *groups, weights, y
    kernel((blocks, len(groups.tile_expert), 1), WARPS * 32, *args, shared=memory)
