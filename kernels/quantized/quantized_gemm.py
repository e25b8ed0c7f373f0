"""GEMMs of up to 64 rows with quantised weights in pieces, on sm_90 and sm_100: a block on each multiprocessor."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from .. import jit
from ..activation.activation import gate_sizes
from ..device import WHOLE_SHARED, device_caps
from . import quantized_wgmma
from .quantized_wgmma import STRIP

if TYPE_CHECKING:
    from .pieces_cuda import Layout, Packed

MOST_ROWS = 64
HEIGHTS = (32, 48, 64, 96, 112, 128, 192, 224)  # outputs of a tile
LENGTHS = (512, 256, 128, 64)  # inputs of a chunk
WARPS = 12  # of a block that multiply, at most, where there are several to a strip
TURN_WARPS = 16  # of a block that multiply, at most, where they take turns
TURN_INPUTS = 256  # of a chunk, where warps take turns
LEAST_STAGES = 4


class TileConfig(NamedTuple):
    """The tiles of quantized_gemm.cu."""

    outputs: int  # of a tile
    inputs: int  # of a chunk
    in_turn: bool = False  # whether warps take chunks in turn, and others sum x up; otherwise warps share out chunks


def choose(rows: int, outputs: int, inputs: int, layout: Layout, gated: bool, num_sms: int) -> TileConfig | None:
    """The fastest tiles for these sizes; None: the kernel does not take them."""
    cost = functools.partial(_cost, rows, outputs, layout, num_sms)
    return min(configs(rows, outputs, inputs, layout, gated), key=cost, default=None)


def _cost(rows: int, outputs: int, layout: Layout, num_sms: int, config: TileConfig) -> tuple[float, bool, int]:
    """Of the busiest block's tiles: as long as its outputs take to be read, and x as half as many of 8 bits; then
    turns first, and long chunks up to 256."""
    tiles, weights = -(-outputs // config.outputs), config.outputs * layout.bytes / layout.inputs / 17
    slower = 1.3 if config.inputs < layout.chunk else 1
    return (
        -(-tiles // num_sms) * (weights + 4 * _row_tiles(rows)) * slower,
        not config.in_turn,
        -min(config.inputs, 256),
    )


def configs(rows: int, outputs: int, inputs: int, layout: Layout, gated: bool) -> Iterator[TileConfig]:
    """All that `gemm` takes for these sizes."""
    turns = (False, True) if takes_turns(layout.sizes) and _row_tiles(rows) <= 2 else (False,)
    for height in HEIGHTS:
        if (gated and height % (2 * STRIP)) or (_row_tiles(rows) > 2 and _strips_of_a_warp(height, 4) == 1):
            continue
        for length in LENGTHS:
            for in_turn in turns if length == TURN_INPUTS else (False,):
                config = TileConfig(height, length, in_turn)
                whole = inputs % (length * _turns(config)) == length % layout.inputs == 0
                if whole and stages(config, rows, layout)[0] >= max(LEAST_STAGES, 2 * _turns(config)):
                    yield config


def gemm(x: Tensor, packed: Packed, config: TileConfig, gate: str = "", bias: Tensor | None = None) -> Tensor:
    """Of up to MOST_ROWS rows, a block on each multiprocessor."""
    (rows, inputs), outputs = x.shape, packed.outputs
    y = x.new_empty(rows, outputs // 2 if gate else outputs)
    _, shared = stages(config, rows, packed.layout)
    of = sizes(rows, inputs, config, gate, bias is not None, packed.layout)
    kernel = jit.kernel("quantized_gemm", "quantized_gemm", x.dtype, shared, **of)
    blocks = min(-(-outputs // config.outputs), device_caps(x.device).num_sms)
    of_x = jit.tensor_map(x.data_ptr(), rows, inputs, rows, inputs)
    args = of_x, packed.pieces, x if bias is None else bias, y, rows, outputs
    threads = _threads(config, rows, packed.layout) + 32 * (1 + _summers(config))
    kernel((blocks, 1, 1), threads, *args, shared=shared)
    return y


def stages(config: TileConfig, rows: int, layout: Layout) -> tuple[int, int]:
    """Chunks that a block holds at once, and all bytes of its shared memory, as quantized_gemm.cu lays it out."""
    padded, turns = 8 * _row_tiles(rows), _turns(config)
    sums = _groups(config, rows, layout) * turns * config.outputs * (padded + 1) * 4
    stage = padded * config.inputs * 2 + config.outputs // STRIP * (config.inputs // layout.inputs) * layout.bytes
    if config.in_turn:  # sums of x over 32 inputs, in two forms
        stage += _row_tiles(rows) * (config.inputs * 2 + 256)
    stage = -(-stage // 1024) * 1024
    # A turn has stages of its own.
    count = min((WHOLE_SHARED - 1024 - sums) // stage, quantized_wgmma.MOST_STAGES) // turns * turns
    return count, 1024 + count * stage + sums


def sizes(rows: int, inputs: int, config: TileConfig, gate: str, bias: bool, layout: Layout) -> dict[str, jit.Size]:
    """What quantized_gemm.cu is compiled for."""
    tiles = _row_tiles(rows)
    return dict(
        **layout.constants,
        I=inputs,
        M=config.outputs,
        KC=config.inputs,
        STAGES=stages(config, rows, layout)[0],
        TILES=tiles,
        MT=_strips_of_a_warp(config.outputs, tiles),
        GROUPS=_groups(config, rows, layout),
        TURNS=_turns(config),
        SUMMERS=_summers(config),
        MULTIPLY="gemm_summed" if config.in_turn else "gemm_plain",
        **gate_sizes(gate),
        BIAS=int(bias),
    )


def takes_turns(sizes: Iterable[tuple[str, int]]) -> bool:
    """Whether quantized_gemm.cu's warps may take turns: by super-blocks of 256 inputs with minima of 32 each."""
    return {("FACTORED", TURN_INPUTS), ("GROUP", 32), ("MINIMA", 1)} <= set(sizes)


def _turns(config: TileConfig) -> int:
    """Warps that take chunks of a strip in turn."""
    most = TURN_WARPS // (config.outputs // STRIP)
    return next(count for count in (8, 4, 2, 1) if count <= most) if config.in_turn else 1


def _summers(config: TileConfig) -> int:
    """Warps that sum x up: of few outputs a chunk is multiplied soon. Each has stages of its own, too."""
    return min(_turns(config), 4 if config.outputs <= 32 else 2 if config.outputs <= 64 else 1) if config.in_turn else 0


def _threads(config: TileConfig, rows: int, layout: Layout) -> int:
    """That multiply."""
    warps = config.outputs // STRIP // _strips_of_a_warp(config.outputs, _row_tiles(rows))
    return warps * _groups(config, rows, layout) * _turns(config) * 32


def _row_tiles(rows: int) -> int:
    return next(tiles for tiles in (1, 2, 4, 8) if rows <= 8 * tiles)


def _strips_of_a_warp(height: int, tiles: int) -> int:
    """So that of many rows x is not read from shared memory for each strip: that is more than it gives."""
    return 1 if tiles < 4 else next(count for count in (2, 3, 1) if height // STRIP % count == 0)


def _groups(config: TileConfig, rows: int, layout: Layout) -> int:
    """Warps that share a chunk of a strip: as many as make WARPS, each with a piece at least."""
    if config.in_turn:
        return 1
    warps = config.outputs // STRIP // _strips_of_a_warp(config.outputs, _row_tiles(rows))
    most = min(WARPS // warps, config.inputs // layout.inputs)
    return max(count for count in (1, 2, 4, 8) if count <= max(most, 1))
