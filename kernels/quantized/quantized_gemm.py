"""GEMMs of up to 64 rows with quantised weights in packed tiles: the configs of three kernels, and which are the
fastest.

quantized_gemm.cu has a block on each multiprocessor, of sm_90 and sm_100. quantized_gemv.cu is for up to eight rows on
GPUs and of sizes that it rejects. grouped_gemv.cu is for a row on sm_90 and sm_100, of super-blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from .. import jit
from ..device import WHOLE_SHARED
from .packed_layouts import N_TILE
from .quantized_wgmma import MAX_STAGES, Grid

if TYPE_CHECKING:
    from .packed_gemm import Layout

# -- quantized_gemv.cu

GEMV_ROWS = 8  # at most
GEMV_WARPS = 8
GEMV_SHARED = 80 << 10  # bytes of a block: two fit on a multiprocessor of sm_80
LARGE = 800  # bytes of a packed tile above which a lane's registers hold half as many


class GemvConfig(NamedTuple):
    """How quantized_gemv.cu shares out a GEMV."""

    n_tiles: int  # of a block; two with a gate
    ahead: int  # packed tiles of each that a warp has under way
    blocks: int  # that fit on a multiprocessor

    def shared(self, rows: int, inputs: int, layout: Layout) -> int:
        """Bytes of shared memory, as quantized_gemv.cu lays it out."""
        return rows * (inputs * 2 + 16) + GEMV_WARPS * self.n_tiles * 512

    def sizes(self, rows: int, inputs: int, layout: Layout) -> dict[str, jit.Size]:
        return dict(R=rows, N_TILES=self.n_tiles, AHEAD=self.ahead, WARPS=GEMV_WARPS, BLOCKS=self.blocks)

    def grid(self, rows: int, outputs: int, layout: Layout, num_sms: int) -> Grid:
        return Grid(-(-outputs // (N_TILE * self.n_tiles)), GEMV_WARPS * 32)


def choose_gemv(rows: int, outputs: int, inputs: int, layout: Layout, gated: bool, num_sms: int) -> GemvConfig | None:
    """None: the kernel does not take so many rows, or x does not fit."""
    config = GemvConfig(2, 4, 2) if gated or -(-outputs // N_TILE) > 24 * num_sms else GemvConfig(1, 8, 2)
    if layout.bytes > LARGE:
        config = config._replace(ahead=config.ahead // 2)
    return config if rows <= GEMV_ROWS and config.shared(rows, inputs, layout) <= GEMV_SHARED else None


# -- grouped_gemv.cu

GROUPED_WARPS = 8  # of a block, with a part of each n-tile
GROUPED_BLOCKS = 2  # on a multiprocessor
RUNS = (4, 2)
GROUPED_SHARED = 110 << 10  # bytes of a block: two fit on a multiprocessor
LEAST_GROUPED_STAGES, MAX_GROUPED_STAGES = 2, 6


class GroupedConfig(NamedTuple):
    """How grouped_gemv.cu shares out a GEMV."""

    n_tiles: int  # of a tile: two with a gate
    run: int  # packed tiles of an n-tile that a warp takes at once

    def stages(self, inputs: int, layout: Layout) -> tuple[int, int]:
        """A warp's stages, and all bytes of a block's shared memory, as grouped_gemv.cu lays it out."""
        groups = inputs // dict(layout.sizes)["GROUP"]
        fixed = 16 + inputs * 2 + -(-groups // 4) * 16 + 2 * self.n_tiles * GROUPED_WARPS * 256
        stage = GROUPED_WARPS * self.n_tiles * self.run * layout.bytes
        count = min((GROUPED_SHARED - fixed) // stage, MAX_GROUPED_STAGES)
        return count, fixed + count * stage

    def shared(self, rows: int, inputs: int, layout: Layout) -> int:
        return self.stages(inputs, layout)[1]

    def sizes(self, rows: int, inputs: int, layout: Layout) -> dict[str, jit.Size]:
        of = dict(N_TILES=self.n_tiles, WARPS=GROUPED_WARPS, RUN=self.run, BLOCKS=GROUPED_BLOCKS)
        return dict(STAGES=self.stages(inputs, layout)[0], **of)

    def grid(self, rows: int, outputs: int, layout: Layout, num_sms: int) -> Grid:
        return Grid(min(-(-outputs // N_TILE) // self.n_tiles, GROUPED_BLOCKS * num_sms), GROUPED_WARPS * 32)


def choose_grouped(
    rows: int, outputs: int, inputs: int, layout: Layout, gated: bool, num_sms: int
) -> GroupedConfig | None:  # fmt: skip
    """None: the kernel does not take the format or so many inputs."""
    return next(iter(grouped_configs(inputs, layout, gated)), None)


def grouped_configs(inputs: int, layout: Layout, gated: bool) -> Iterator[GroupedConfig]:
    """All that the kernel takes, which are runs that are whole and of which enough stages fit, the longest first."""
    if layout.header != "super_blocks" or inputs % layout.inputs:
        return
    unit, packed_tiles = 8 * int(dict(layout.sizes)["GROUP"]), inputs // layout.inputs
    for run in RUNS:
        config = GroupedConfig(1 + gated, run)
        whole = packed_tiles % run == run * layout.inputs % unit == unit % layout.inputs == 0
        if whole and config.stages(inputs, layout)[0] >= LEAST_GROUPED_STAGES:
            yield config


# -- quantized_gemm.cu

MAX_ROWS = 64
HEIGHTS = (32, 48, 64, 96, 112, 128, 192, 224)  # outputs of a tile
LENGTHS = (512, 256, 128, 64)  # inputs of a chunk
WARPS = 12  # of a block that multiply, at most, where there are several to an n-tile
TURN_WARPS = 16  # of a block that multiply, at most, where they take turns
TURN_INPUTS = 256  # of a chunk, where warps take turns
LEAST_STAGES = 4


class TileConfig(NamedTuple):
    """The tiles of quantized_gemm.cu."""

    outputs: int  # of a tile
    inputs: int  # of a chunk
    in_turn: bool = False  # whether warps take chunks in turn, and others sum x up; otherwise warps share out chunks

    @property
    def turns(self) -> int:
        """Warps that take chunks of an n-tile in turn."""
        most = TURN_WARPS // (self.outputs // N_TILE)
        return next(count for count in (8, 4, 2, 1) if count <= most) if self.in_turn else 1

    @property
    def summers(self) -> int:
        """Warps that sum x up: of few outputs a chunk is multiplied soon. Each has stages of its own, too."""
        most = 4 if self.outputs <= 32 else 2 if self.outputs <= 64 else 1
        return min(self.turns, most) if self.in_turn else 0

    def n_tiles_per_warp(self, tiles: int) -> int:
        """So that for large M x is not read from shared memory for each n-tile: that is more than it gives."""
        return 1 if tiles < 4 else next(count for count in (2, 3, 1) if self.outputs // N_TILE % count == 0)

    def groups(self, tiles: int, layout: Layout) -> int:
        """Warps that share a chunk of an n-tile: as many as make WARPS, each with a packed tile at least."""
        most = min(WARPS // self._warps(tiles), self.inputs // layout.inputs)
        return 1 if self.in_turn else max(count for count in (1, 2, 4, 8) if count <= max(most, 1))

    def _warps(self, tiles: int) -> int:
        return self.outputs // N_TILE // self.n_tiles_per_warp(tiles)

    def stages(self, rows: int, layout: Layout) -> tuple[int, int]:
        """Chunks that a block holds at once, and all bytes of its shared memory, as quantized_gemm.cu lays it out."""
        tiles = row_tiles(rows)
        sums = self.groups(tiles, layout) * self.turns * self.outputs * (8 * tiles + 1) * 4
        weights = self.outputs // N_TILE * (self.inputs // layout.inputs) * layout.bytes
        stage = 8 * tiles * self.inputs * 2 + weights
        if self.in_turn:  # sums of x over 32 inputs, in two forms
            stage += tiles * (self.inputs * 2 + 256)
        stage = -(-stage // 1024) * 1024
        # A turn has stages of its own.
        count = min((WHOLE_SHARED - 1024 - sums) // stage, MAX_STAGES) // self.turns * self.turns
        return count, 1024 + count * stage + sums

    def shared(self, rows: int, inputs: int, layout: Layout) -> int:
        return self.stages(rows, layout)[1]

    def sizes(self, rows: int, inputs: int, layout: Layout) -> dict[str, jit.Size]:
        tiles = row_tiles(rows)
        warps = dict(MT=self.n_tiles_per_warp(tiles), GROUPS=self.groups(tiles, layout), TURNS=self.turns)
        stages, multiply = self.stages(rows, layout)[0], "gemm_summed" if self.in_turn else "gemm_plain"
        of = dict(M=self.outputs, KC=self.inputs, STAGES=stages, TILES=tiles, SUMMERS=self.summers)
        return dict(MULTIPLY=multiply, **of, **warps)

    def grid(self, rows: int, outputs: int, layout: Layout, num_sms: int) -> Grid:
        tiles = row_tiles(rows)
        warps = self._warps(tiles) * self.groups(tiles, layout) * self.turns + self.summers + 1
        return Grid(min(-(-outputs // self.outputs), num_sms), warps * 32, box=rows)


def row_tiles(rows: int) -> int:
    return next(tiles for tiles in (1, 2, 4, 8) if rows <= 8 * tiles)


def choose(rows: int, outputs: int, inputs: int, layout: Layout, gated: bool, num_sms: int) -> TileConfig | None:
    """The fastest tiles for these sizes; None: the kernel does not take them."""
    cost = functools.partial(_cost, rows, outputs, layout, num_sms)
    return min(configs(rows, outputs, inputs, layout, gated), key=cost, default=None)


def _cost(rows: int, outputs: int, layout: Layout, num_sms: int, config: TileConfig) -> tuple[float, bool, int]:
    """How long the busiest block takes to read its weights, and x of more than eight rows, for which a tile counts as
    four outputs of 8 bits for eight rows. Where these are equal: turns, then long chunks up to 256, then small tiles.
    Measured: docs/measurements/small-batches.md."""
    tiles, weights = -(-outputs // config.outputs), config.outputs * layout.bytes / layout.inputs / 17
    slower = 1.3 if config.inputs < layout.chunk else 1
    of_x = 4 * row_tiles(rows) if rows > 8 else 0
    return -(-tiles // num_sms) * (weights + of_x) * slower, not config.in_turn, -min(config.inputs, 256)


def configs(rows: int, outputs: int, inputs: int, layout: Layout, gated: bool) -> Iterator[TileConfig]:
    """All that quantized_gemm.cu takes for these sizes."""
    tiles = row_tiles(rows)
    turns = (False, True) if takes_turns(layout.sizes) and tiles <= 2 else (False,)
    for height in HEIGHTS:
        if (gated and height % (2 * N_TILE)) or (tiles > 2 and TileConfig(height, 0).n_tiles_per_warp(4) == 1):
            continue
        for length in LENGTHS:
            for in_turn in turns if length == TURN_INPUTS else (False,):
                config = TileConfig(height, length, in_turn)
                whole = inputs % (length * config.turns) == length % layout.inputs == 0
                if whole and config.stages(rows, layout)[0] >= max(LEAST_STAGES, 2 * config.turns):
                    yield config


def takes_turns(sizes: Iterable[tuple[str, int]]) -> bool:
    """Whether quantized_gemm.cu's warps may take turns: by super-blocks of 256 inputs with minima of 32 each."""
    return {("FACTORED", TURN_INPUTS), ("GROUP", 32), ("MINIMA", 1)} <= set(sizes)
