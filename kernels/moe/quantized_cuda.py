"""Quantised experts on GPUs: quantized_experts.cu, over pairs that are sorted by expert, in tiles of 8 to 64 pairs."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from .. import jit
from ..device import DeviceCaps
from ..quantized import e4m3_wgmma, pieces_cuda
from ..quantized.pieces_cuda import LARGE, STRIP, Layout
from ..quantized.stack import Stack
from . import dequantized, e4m3_experts, quantized_pipeline, quantized_wgmma_experts
from .group import Groups
from .quantized_pipeline import PipelineConfig
from .quantized_wgmma_experts import WgmmaExpertsConfig

# Most pairs per expert → tiles of 8 rows of a block; of more it has 8. moe.tiling_rows has the same borders.
TILES = {4: 1, 8: 2, 24: 4}
WARPS = 8
WHOLE = 32 << 10  # elements of x that lie in shared memory at once
CHUNK = 8 << 10  # or so many twice, which threads have in their registers on the way
# Of quantized_pipeline.cu, whose warps have a unit of 32 outputs each: of few units most are idle. One token of
# Qwen3-30B-A3B has 2.9, and is faster; more than 4 pairs per expert, and fewer units, were not timed.
PIPELINE_PAIRS = 8  # most per expert
PIPELINE_UNITS = 2  # least of a multiprocessor


class ExpertTileConfig(NamedTuple):
    """The tile of a block of quantized_experts.cu, and how its warps share it."""

    tiles: int  # of 8 rows
    groups: int  # of warps that share a strip
    inputs: int  # of a chunk of x
    ahead: int  # pieces of a strip that a warp has under way

    @property
    def rows(self) -> int:
        return 8 * self.tiles


def supports(x: Tensor, w13: object, w2: object) -> bool:
    """Whether `expert_up` and `expert_down` take these."""
    if not isinstance(w13, Stack) or not isinstance(w2, Stack) or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    pieces = isinstance(w13.packed, pieces_cuda.Packed) and isinstance(w2.packed, pieces_cuda.Packed)
    return pieces and w2.shape[2] % STRIP == 0 and jit.plain(x, *w13.tensors, *w2.tensors)


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


KernelConfig = ExpertTileConfig | PipelineConfig | WgmmaExpertsConfig | e4m3_wgmma.E4m3Config


class KernelConfigs(NamedTuple):
    """How both GEMMs are computed; their tiles have the same rows."""

    up: KernelConfig
    down: KernelConfig

    @property
    def rows(self) -> int:
        return self.up.rows


def multiplies_codes(pairs: int, experts: int, w13: object, w2: object, found: DeviceCaps) -> bool:
    """Whether `choose_kernels` is faster than GEMMs of weights that are dequantised first."""
    return pairs <= dequantized.LEAST_PAIRS * experts or e4m3_experts.takes(w13, w2, found)


def choose_kernels(pairs: int, experts: int, w13: Stack, w2: Stack, found: DeviceCaps) -> KernelConfigs:
    """Of so many pairs of all experts."""
    if pairs > e4m3_experts.MOST_OF_16_BITS * experts and e4m3_experts.takes(w13, w2, found):
        return KernelConfigs(*e4m3_experts.choose(pairs, experts))
    if pairs > quantized_wgmma_experts.LEAST_PAIRS * experts and quantized_wgmma_experts.takes(w13, w2, found):
        return KernelConfigs(*quantized_wgmma_experts.choose(pairs, experts, w13, w2, found.num_sms))
    units = min(pairs, experts) * w13.shape[1] // (2 * STRIP)
    if found.has_tma and pairs <= PIPELINE_PAIRS * experts and units >= PIPELINE_UNITS * found.num_sms:
        up, down = (choose_pipeline(one) for one in (w13, w2))
        if up or down:
            return KernelConfigs(up or tiled_config(1, w13, True), down or tiled_config(1, w2, False))
    return tiled_configs(choose_tiles(pairs, experts), w13, w2)


def tiled_configs(tiles: int, w13: Stack, w2: Stack) -> KernelConfigs:
    """Both by quantized_experts.cu."""
    return KernelConfigs(tiled_config(tiles, w13, True), tiled_config(tiles, w2, False))


def tiled_config(tiles: int, stack: Stack, gated: bool) -> ExpertTileConfig:
    return choose(tiles, stack.shape[2], stack.packed.layout, gated)


def choose_pipeline(stack: Stack) -> PipelineConfig | None:
    """None: its format is slower there, or x does not fit."""
    inputs, layout = stack.shape[2], stack.packed.layout
    counts = quantized_pipeline.WARPS, *quantized_pipeline.FEWER
    return next((found for n in counts if (found := quantized_pipeline.choose(inputs, layout, n))), None)


def expert_up(
    x: Tensor, weights: Tensor, w13: Stack, groups: Groups, top: int, act: str, config: KernelConfig,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[pairs, I] in the order of the groups: the pairs' weights * act(gate) * up, of x [T, H]; config: of the
    groups' rows."""
    pairs = len(groups.order)
    h = x.new_empty(max(pairs, config.rows), w13.shape[1] // 2)[:pairs]  # in memory that has a tile's rows at least
    _launch(x, w13, groups, weights, h, act, top, config, bias)
    return h


def expert_down(
    h: Tensor, weights: Tensor, w2: Stack, groups: Groups, config: KernelConfig, bias: Tensor | None = None
) -> Tensor:
    """[pairs, H], in the pairs' own order, of h [pairs, I] in that of the groups. weights: of the bias."""
    y = h.new_empty(len(h), w2.shape[1])
    _launch(h, w2, groups, weights, y, "", 1, config, bias)
    return y


def _launch(
    x: Tensor, stack: Stack, groups: Groups, weights: Tensor, y: Tensor, act: str, top: int,
    config: KernelConfig, bias: Tensor | None,
) -> None:  # fmt: skip
    if isinstance(config, PipelineConfig):
        return quantized_pipeline.launch(x, stack, groups, weights, y, act, top, config, bias)
    if isinstance(config, e4m3_wgmma.E4m3Config):
        return e4m3_experts.launch(x, stack, groups, weights, y, act, top, config, bias)
    if isinstance(config, WgmmaExpertsConfig):
        return quantized_wgmma_experts.launch(x, stack, groups, weights, y, act, top, config, bias)
    memory = shared(config, stack.shape[2], bool(act))
    of = sizes(stack, config, act, top, bias is not None)
    kernel = jit.kernel("quantized_experts", "quantized_experts", x.dtype, memory, **of)
    blocks = -(-y.shape[1] // (STRIP * (WARPS // config.groups)))
    args = x, stack.packed.pieces, x if bias is None else bias, *groups, weights, y
    return kernel((blocks, len(groups.tile_expert), 1), WARPS * 32, *args, shared=memory)
