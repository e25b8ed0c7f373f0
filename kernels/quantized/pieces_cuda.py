"""Linears on GPUs whose weights are quantised, in pieces of 16 outputs in the order in which tensor cores take them.

So a lane gets its codes of a piece by one access, from memory or from shared memory, and a strip of 16 outputs is one
run of memory, which bulk copies bring. A format says how its pieces look: a header of this folder, and a `Layout`.
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
from . import grouped_gemv, quantized_gemv, quantized_wgmma
from .grouped_gemv import GroupedConfig
from .quantized_gemv import GemvConfig
from .quantized_wgmma import STRIP, WgmmaConfig, WgmmaParts

GEMV_ROWS = 4  # more are faster by quantized_gemm.cu, of most formats
MOST_ROWS = 64
HEIGHTS = (32, 48, 64, 96, 112, 128, 192, 224)  # outputs of a tile
LENGTHS = (512, 256, 128, 64)  # inputs of a chunk
WARPS = 12  # of a block that multiply, at most, where there are several to a strip
TURN_WARPS = 16  # of a block that multiply, at most, where they take turns
TURN_INPUTS = 256  # of a chunk, where warps take turns
LEAST_STAGES = 4
RUN = 4  # pieces that a warp of dequantize.cu takes


class Layout(NamedTuple):
    """How pieces of a format look to the kernels."""

    header: str  # the file that knows them, which stands for FORMAT in the kernels' sources
    inputs: int  # of a piece
    bytes: int  # of a piece
    widening: float  # cycles of a multiprocessor to make weights of 16 inputs of an output, roughly
    sizes: tuple[tuple[str, int], ...] = ()  # constants of the header
    gemv_rows: int = GEMV_ROWS  # more are faster by quantized_gemm.cu
    chunk: int = 0  # inputs of a chunk, of which fewer are slow to copy
    alike: int = 1  # pieces along the inputs that have the same scales
    streamed: int = 0  # inputs that quantized_experts.cu streams at a time, where these are not a piece's

    @property
    def constants(self) -> dict[str, jit.Size]:
        """What stands for the format in the kernels' sources."""
        return {"FORMAT": self.header, **dict(self.sizes)}


class Packed(NamedTuple):
    """A weight [O, I] as pieces: uint8 [ceil(O / 16), I / layout.inputs, layout.bytes]; outputs past O are zeros."""

    pieces: Tensor
    outputs: int
    layout: Layout

    @property
    def inputs(self) -> int:
        return self.pieces.shape[1] * self.layout.inputs

    def part(self, first: int, last: int) -> Packed:
        """Outputs first to last; first is a strip's."""
        return self._replace(pieces=self.pieces[first // STRIP : -(-last // STRIP)], outputs=last - first)


class TileConfig(NamedTuple):
    """The tiles of quantized_gemm.cu."""

    outputs: int  # of a tile
    inputs: int  # of a chunk
    in_turn: bool = False  # whether warps take chunks in turn, and others sum x up; otherwise warps share out chunks


KernelConfig = GemvConfig | GroupedConfig | TileConfig | WgmmaConfig | WgmmaParts
Sizes = dict[str, jit.Size]


def takes(x: Tensor, packed: Packed, bias: Tensor | None) -> bool:
    """Whether kernels that read pieces take x [T, I] and bias [O]."""
    typed = x.dtype in (torch.bfloat16, torch.float16) and (bias is None or bias.dtype == x.dtype)
    return x.is_cuda and x.dim() == 2 and typed and jit.plain(x, packed.pieces)


def supports(x: Tensor, packed: Packed, bias: Tensor | None = None) -> bool:
    """Whether `linear` takes x [T, I] and bias [O], and is faster than `dequantize` and a GEMM."""
    return takes(x, packed, bias) and _plan(len(x), packed, "", device_caps(x.device))[0] is not None


def linear(x: Tensor, packed: Packed, gate: str = "", bias: Tensor | None = None) -> Tensor:
    """x [T, I] times the transpose of the weight [O, I], plus bias [O], where `supports` says so; accumulated in f32.

    gate: an activation of the first half of the outputs times the second half; "": the outputs as they are.
    """
    config, fused = _plan(len(x), packed, gate, device_caps(x.device))
    assert config is not None, "supports() was not asked"
    if isinstance(config, GemvConfig):
        y = quantized_gemv.gemv(x, packed, config, fused, bias)
    elif isinstance(config, GroupedConfig):
        y = grouped_gemv.gemv(x, packed, config, fused, bias)
    elif isinstance(config, WgmmaConfig):
        y = quantized_wgmma.gemm(x, packed, config, fused, bias)
    elif isinstance(config, WgmmaParts):
        y = quantized_wgmma.gemm_in_parts(x, packed, config, fused, bias)
    else:
        y = gemm(x, packed, config, fused, bias)
    return y if fused == gate else gated_activation(y, gate)


def dequantize(packed: Packed, dtype: torch.dtype) -> Tensor:
    """The weight [O, I] in a dtype of 16 bits, each element rounded once."""
    out = torch.empty(packed.outputs, packed.inputs, dtype=dtype, device=packed.pieces.device)
    kernel = jit.kernel("dequantize", "dequantize", dtype, 0, **_dequantize_sizes(packed.inputs, packed.layout))
    strips, groups, _ = packed.pieces.shape
    warps = min(8, -(-groups // RUN))
    kernel((-(-groups // (RUN * warps)), strips, 1), warps * 32, packed.pieces, out, packed.outputs)
    return out


def variants(
    rows: Iterable[int], packed: object, dtype: torch.dtype, gate: str, bias: bool, found: DeviceCaps
) -> Iterator[jit.KernelVariant]:
    """What the GEMM of so many rows, each, is compiled as; nothing of a weight that is not in pieces."""
    if not isinstance(packed, Packed):
        return
    for n in rows:
        config, fused = _plan(n, packed, gate, found)
        if isinstance(config, GemvConfig):
            sizes = quantized_gemv.sizes(n, packed.inputs, config, fused, bias, packed.layout)
            yield jit.variant("quantized_gemv", dtype, **sizes)
        elif isinstance(config, GroupedConfig):
            sizes = grouped_gemv.sizes(n, packed.inputs, config, fused, bias, packed.layout)
            yield jit.variant("grouped_gemv", dtype, **sizes)
        elif isinstance(config, WgmmaConfig | WgmmaParts):
            for one in (config,) if isinstance(config, WgmmaConfig) else (config.first, config.rest):
                sizes = quantized_wgmma.sizes(packed.inputs, one, fused, bias, packed.layout)
                yield jit.variant("quantized_wgmma", dtype, **sizes)
        elif config:
            sizes = _gemm_sizes(n, packed.inputs, config, fused, bias, packed.layout)
            yield jit.variant("quantized_gemm", dtype, **sizes)


def _plan(rows: int, packed: Packed, gate: str, found: DeviceCaps) -> tuple[KernelConfig | None, str]:
    """How the GEMM is computed, and the gate if that takes it: not where its halves share a strip."""
    sizes = packed.outputs, packed.inputs, packed.layout
    if gate and packed.outputs % (2 * STRIP) == 0:
        config = choose(rows, *sizes, True, found)
        if config:
            return config, gate
    return choose(rows, *sizes, False, found), ""


@functools.cache
def choose(rows: int, outputs: int, inputs: int, layout: Layout, gated: bool, found: DeviceCaps) -> KernelConfig | None:
    """The fastest kernel for these sizes; None: weights are dequantised first."""
    if found.hopper and rows in quantized_wgmma.ROWS and inputs % max(quantized_wgmma.LENGTHS[-1], layout.inputs) == 0:
        return quantized_wgmma.choose(rows, outputs, inputs, layout, gated, found.num_sms)
    if not 0 < rows <= MOST_ROWS:
        return None
    if found.has_tma and (by_groups := grouped_gemv.choose(rows, inputs, layout, gated)):
        return by_groups
    config = quantized_gemv.choose(rows, outputs, inputs, layout, gated, found.num_sms)
    if config and (rows <= layout.gemv_rows or not found.has_tma or inputs % LENGTHS[-1]):
        return config
    configs = tile_configs(rows, outputs, inputs, layout, gated) if found.has_tma else ()
    return min(configs, key=functools.partial(_cost, rows, outputs, layout, found.num_sms), default=None)


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


def tile_configs(rows: int, outputs: int, inputs: int, layout: Layout, gated: bool) -> Iterator[TileConfig]:
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
    sizes = _gemm_sizes(rows, inputs, config, gate, bias is not None, packed.layout)
    kernel = jit.kernel("quantized_gemm", "quantized_gemm", x.dtype, shared, **sizes)
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


def _dequantize_sizes(inputs: int, layout: Layout) -> Sizes:
    return dict(I=inputs, RUN=RUN, **layout.constants)


def _gemm_sizes(rows: int, inputs: int, config: TileConfig, gate: str, bias: bool, layout: Layout) -> Sizes:
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
