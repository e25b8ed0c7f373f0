"""Grouped GEMMs of quantised experts on GPUs: five kernels that read packed weights as they lie.

A layer has two, gate and up with the activation, and down. Routed tokens are sorted by expert and cut into tiles
(group.py), but for the GEMV. The type of a GEMM's config decides which kernel computes it; moe.py decides which are
chosen.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .. import jit
from ..activation.activation import gate_sizes
from ..device import WHOLE_SHARED, DeviceCaps, device_caps
from ..quantized import cuda_layouts, e4m3_wgmma, packed_gemm
from ..quantized.e4m3_wgmma import E4m3Config
from ..quantized.packed_gemm import Layout
from ..quantized.packed_layouts import N_TILE
from ..quantized.quantized_gemm import LARGE
from ..quantized.quantized_wgmma import blocks_at_once
from ..quantized.stack import Stack
from .group import E4m3Routed, Groups, encode_routed, gather, group

if TYPE_CHECKING:
    from .moe import Inputs

E4M3 = cuda_layouts.E4M3_WIDE.header


def takes(x: Tensor, w13: object, w2: object) -> bool:
    """Whether kernels of this file take these."""
    if not isinstance(w13, Stack) or not isinstance(w2, Stack) or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    packed_tiles = isinstance(w13.packed, packed_gemm.Packed) and isinstance(w2.packed, packed_gemm.Packed)
    return packed_tiles and w2.shape[2] % N_TILE == 0 and jit.plain(x, *w13.tensors, *w2.tensors)


def _header(stack: Stack) -> str:
    """The format's."""
    return str(stack.packed.layout.header)


class Gemm(NamedTuple):
    """One of a layer's grouped GEMMs: y of x."""

    x: Tensor  # of gate and up [T, H]; of down [routed, I], in the order of the groups
    stack: Stack
    groups: Groups
    weights: Tensor  # [T, k] f32, the routed tokens': they scale what gate and up make, and down's bias
    y: Tensor  # of gate and up [routed, I], in the order of the groups; of down [routed, H], in the routed tokens' own
    act: str  # of the gate; "": down
    top: int  # routed tokens of a row of x; 0: rows are routed tokens
    bias: Tensor | None

    @property
    def packed_tiles(self) -> Tensor:
        return self.stack.packed.tiles

    @property
    def layout(self) -> Layout:
        found: Layout = self.stack.packed.layout
        return found

    @property
    def tiles(self) -> int:
        return len(self.groups.tile_expert)

    @property
    def num_sms(self) -> int:
        return device_caps(self.x.device).num_sms

    def sizes(self, config: Config) -> dict[str, jit.Size]:
        return sizes(self.stack, config, self.act, max(self.top, 1), self.bias is not None)

    def bias_or(self, other: Tensor) -> Tensor:
        """Stands in place of a bias that a kernel without one does not touch."""
        return other if self.bias is None else self.bias


def sizes_of_gemm(stack: Stack, act: str, top: int, bias: bool) -> dict[str, jit.Size]:
    """Compile-time constants of every kernel, whatever its tiles."""
    _, outputs, inputs = stack.shape
    constants = stack.packed.layout.constants
    return dict(**constants, I=inputs, OUTPUTS=outputs, TOP=top, **gate_sizes(act), BIAS=int(bias))


# -- small batches: two kernels that read weights routed token by routed token (quantized_expert_gemv.cu)

GEMV_WARPS = 8  # of a block
GEMV_SHARED = 96 << 10  # bytes of x in a block's shared memory: two blocks fit on a multiprocessor of sm_90


def gemv_takes(w13: Stack, w2: Stack, top: int, formats: Sequence[str]) -> bool:
    """Whether weights that `takes` takes have these formats, and x of so many routed tokens a token fits."""
    room = max(w13.shape[2], top * w2.shape[2]) * 2 <= GEMV_SHARED
    return _header(w13) in formats and _header(w2) in formats and top <= 32 and room


def gemv_sizes(stack: Stack, act: str, top: int, bias: bool, part: bool) -> dict[str, jit.Size]:
    """Compile-time constants of quantized_expert_gemv.cu. part: experts are shared out."""
    layout = stack.packed.layout
    packed_tiles = stack.shape[2] // layout.inputs * (1 if act else top)
    most = (4 if act else 6) // (2 if layout.bytes > LARGE else 1)
    ahead = min(most, -(-packed_tiles // GEMV_WARPS))
    return sizes_of_gemm(stack, act, top, bias) | dict(WARPS=GEMV_WARPS, AHEAD=ahead, PART=int(part))


def gemv(given: Inputs) -> Tensor:
    """[T, H], the weighted sums over each token's experts."""
    x, ids, weights, w13, w2, act, biases, local_experts, _ = given
    assert isinstance(w13, Stack) and isinstance(w2, Stack), "`takes` was not asked"
    (tokens, hidden), k = x.shape, ids.shape[1]
    h, y = x.new_empty(tokens * k, w2.shape[2]), x.new_empty(tokens, hidden)
    here = (local_experts.first, local_experts.size) if local_experts else (0, 0)
    for stack, rows, bias, made, of in ((w13, x, biases.up, h, act), (w2, h, biases.down, y, "")):
        consts = gemv_sizes(stack, of, k, bias is not None, local_experts is not None)
        shared = stack.shape[2] * (1 if of else k) * 2
        kernel = jit.kernel("quantized_expert_gemv", "quantized_expert_gemv", x.dtype, shared, **consts)
        args = rows, stack.packed.tiles, rows if bias is None else bias, ids, weights, made, *here
        kernel((len(made), -(-made.shape[1] // N_TILE), 1), GEMV_WARPS * 32, *args, shared=shared)
    return y


# -- any GPU, in tiles of 8 to 64 routed tokens (quantized_experts.cu)

TILES = {4: 1, 8: 2, 24: 4}  # most routed tokens per expert → tiles of 8 rows of a block
MAX_TILES = 8  # of more routed tokens
WARPS = 8
WHOLE = 32 << 10  # elements of x that lie in shared memory at once
CHUNK = 8 << 10  # or so many twice, which threads have in their registers on the way


class ExpertTileConfig(NamedTuple):
    """The tile of a block of quantized_experts.cu, and how its warps share it."""

    tiles: int  # of 8 rows
    groups: int  # of warps that share an n-tile
    inputs: int  # of a chunk of x
    ahead: int  # packed tiles of an n-tile that a warp has under way

    @property
    def rows(self) -> int:
        return 8 * self.tiles

    def shared(self, inputs: int, gated: bool) -> int:
        """Bytes of shared memory, as quantized_experts.cu lays it out."""
        buffers = 1 if self.inputs == inputs else 2
        sums = WARPS * (1 + gated) * N_TILE * (self.rows + 1) * 4
        return max(buffers * self.rows * (self.inputs * 2 + 16), sums)


@functools.cache
def tile_config(tiles: int, inputs: int, layout: Layout, gated: bool) -> ExpertTileConfig:
    """For so many tiles of rows: few of them leave warps to share an n-tile, many want n-tiles to share x."""
    rows, span = 8 * tiles, layout.streamed or layout.inputs
    groups = next(n for n in (8, 4, 2, 1) if n * tiles <= WARPS and inputs % (span * n) == 0)
    if rows * inputs <= WHOLE:
        length = inputs
    else:
        while not (lengths := _lengths(inputs, span * groups, CHUNK // rows)):
            groups //= 2
        length = lengths[-1]
    steps = length // span // groups
    most = 2 if layout.bytes * span // layout.inputs > LARGE or (gated and tiles == MAX_TILES) else 4
    even = [n for n in (4, 2, 1) if n <= most and (length == inputs or steps % n == 0)]
    return ExpertTileConfig(tiles, groups, length, even[0])


def _lengths(inputs: int, unit: int, most: int) -> list[int]:
    """Multiples of `unit` up to `most` that divide the inputs."""
    return [n for n in range(unit, most + 1, unit) if inputs % n == 0]


def tiled(tiles: int, w13: Stack, w2: Stack) -> Configs:
    """Both GEMMs by quantized_experts.cu."""
    up, down = (tile_config(tiles, w.shape[2], w.packed.layout, gated) for w, gated in ((w13, True), (w2, False)))
    return Configs(up, down)


def choose_tiled(routed: int, experts: int, w13: Stack, w2: Stack, _: DeviceCaps) -> Configs:
    tiles = next((tiles for most, tiles in TILES.items() if routed <= most * experts), MAX_TILES)
    return tiled(tiles, w13, w2)


# -- few routed tokens each on sm_90 and sm_100, where all time goes into reading weights (quantized_pipeline.cu)

PIPELINE_UNITS = 2  # of 32 outputs, which a warp has each, least of a multiprocessor; of few units most warps are idle
# Formats that it reads faster than quantized_experts.cu does: not those with a scale for each 32 codes of 8 bits.
PIPELINED = "int4", "super_blocks", "mxfp4", E4M3
# Warps that multiply, each with a ring: with one that brings x, four for each scheduler. 11 take 2 % less of Q4_K with
# 16 and 64 tokens and 4 % more with one; 12 take 7 to 9 % more of FP8 with 1 to 64, and fewer warps more than that.
PIPELINE_WARPS = 15
FEWER_WARPS = 12, 8  # where rings of so many do not fit beside x, as of FP8 with 7168 inputs
PIPELINE_ROWS = 8  # of x in a tile
PART = 2600  # bytes of a copy, at most
LEAST_AHEAD = 48 << 10  # bytes of a block that are under way while each warp multiplies: fewer are slower than memory
MAX_PIPELINE_STAGES = 8


class PipelineConfig(NamedTuple):
    """How a block of quantized_pipeline.cu holds weights and x."""

    warps: int
    run: int  # packed tiles of each of two n-tiles in a stage
    stages: int  # of a warp's ring
    buffers: int  # of x

    @property
    def rows(self) -> int:
        return PIPELINE_ROWS

    def shared(self, inputs: int, layout: Layout) -> int:
        """Bytes of shared memory, as quantized_pipeline.cu lays it out."""
        return self.warps * self.stages * 2 * self.run * layout.bytes + self.buffers * _bytes_of_x(inputs)


@functools.cache
def pipeline_config(inputs: int, layout: Layout, warps: int = PIPELINE_WARPS) -> PipelineConfig | None:
    """Long runs, where enough of them fit next to x. None: they do not, or the format is slower here."""
    if layout.header not in PIPELINED:
        return None
    packed_tiles = inputs // layout.inputs
    for buffers in (2, 1):
        room = (WHOLE_SHARED - buffers * _bytes_of_x(inputs)) // warps
        for run in (n for n in (8, 4, 3, 2, 1) if packed_tiles % n == 0 and n * layout.bytes <= PART):
            stage = 2 * run * layout.bytes
            stages = min(room // stage, MAX_PIPELINE_STAGES)
            if stages == MAX_PIPELINE_STAGES or (stages - 1) * stage * warps >= LEAST_AHEAD:
                return PipelineConfig(warps, run, stages, buffers)
    return None


def _bytes_of_x(inputs: int) -> int:
    """Bytes of a tile of x, with its sums, which most formats leave out."""
    return PIPELINE_ROWS * (inputs * 2 + 16) + inputs


def choose_pipeline(stack: Stack) -> PipelineConfig | None:
    """None: its format is slower there, or x does not fit."""
    counts = PIPELINE_WARPS, *FEWER_WARPS
    return next((one for n in counts if (one := pipeline_config(stack.shape[2], stack.packed.layout, n))), None)


def choose_pipelined(routed: int, experts: int, w13: Stack, w2: Stack, caps: DeviceCaps) -> Configs | None:
    """Both GEMMs, or one next to the other in tiles. None: it takes neither, or is slower."""
    units = min(routed, experts) * w13.shape[1] // (2 * N_TILE)
    if not caps.has_tma or units < PIPELINE_UNITS * caps.num_sms:
        return None
    up, down = (choose_pipeline(one) for one in (w13, w2))
    tiles = tiled(1, w13, w2)
    return Configs(up or tiles.up, down or tiles.down) if up or down else None


# -- some routed tokens on Hopper: weights become 16 bits on their way to tensor cores (quantized_wgmma_experts.cu)

# Most routed tokens per expert → routed tokens of a tile. An expert seldom has two tiles, each of which makes its
# weights again. Timed of 8, 16, 32 and 64 (H200, 2026-11-27, benchmarks/ops_moe.py; as is what follows).
WGMMA_TILES = {10: 16, 24: 32, 32: 48, 48: 64, 64: 96, 1 << 30: 128}
# Outputs of a tile. Of 384 tiles of up to 32 routed tokens took 4 to 6 % less of MXFP4 than of 256, where as few waves
# of blocks make as many outputs; tiles of 48 routed tokens and more took up to 16 % longer. 512 took 5 % less of Q4_K,
# and 37 % more of MXFP4.
OUTPUTS, MORE_OUTPUTS, MAX_ROWS_OF_MORE = 256, 384, 32
LENGTHS = (320, 256, 192, 128, 64)  # inputs of a chunk
LEAST_STAGES, MAX_STAGES = 4, 16


class WgmmaExpertsConfig(NamedTuple):
    """The tiles of quantized_wgmma_experts.cu."""

    rows: int  # routed tokens of one expert: of WGMMA_TILES
    outputs: int  # of the weights: 128 of each warpgroup
    inputs: int  # of a chunk

    def stages(self, layout: Layout) -> tuple[int, int]:
        """Chunks that a block holds at once, and all bytes of its shared memory, as the kernel lays it out."""
        weights = self.outputs // N_TILE * (self.inputs // layout.inputs) * layout.bytes
        stage = -(-(self.rows * self.inputs * 2 + weights) // 1024) * 1024
        count = min((WHOLE_SHARED - 2048) // stage, MAX_STAGES)  # 2048: to begin at a multiple of 1024, and barriers
        return count, 1024 + count * stage


def choose_wgmma(routed: int, experts: int, w13: Stack, w2: Stack, caps: DeviceCaps) -> Configs | None:
    """A box of x has 64 inputs. Weights of e4m3_wide are the first operand in shared memory (e4m3_experts.cu)."""
    both = w13, w2
    in_boxes = all(one.shape[2] % max(64, one.packed.layout.inputs) == 0 for one in both)
    if not caps.hopper or not in_boxes or E4M3 in map(_header, both):
        return None
    rows = next(rows for most, rows in WGMMA_TILES.items() if routed <= most * experts)
    return Configs(*(wgmma_config(rows, _outputs(rows, one, caps.num_sms), one) for one in both))


def _outputs(rows: int, stack: Stack, num_sms: int) -> int:
    """More where blocks have no more to do then, with a tile for each expert."""

    def work(outputs: int) -> int:
        return -(-stack.shape[0] * -(-stack.shape[1] // outputs) // num_sms) * outputs

    return MORE_OUTPUTS if rows <= MAX_ROWS_OF_MORE and work(MORE_OUTPUTS) <= work(OUTPUTS) else OUTPUTS


def wgmma_config(rows: int, outputs: int, stack: Stack) -> WgmmaExpertsConfig:
    """With the longest chunks of which LEAST_STAGES fit."""
    return _wgmma_config(rows, outputs, stack.shape[2], stack.packed.layout)


@functools.cache
def _wgmma_config(rows: int, outputs: int, inputs: int, layout: Layout) -> WgmmaExpertsConfig:
    fitting = (WgmmaExpertsConfig(rows, outputs, n) for n in LENGTHS if inputs % n == n % layout.inputs == 0)
    return next(one for one in fitting if one.stages(layout)[0] >= LEAST_STAGES)


# -- FP8 of more than a few routed tokens on Hopper: x becomes e4m3, too, as of linears (e4m3_experts.cu)

# Most routed tokens per expert → configs of both GEMMs, which have the same rows: on an H200, by
# benchmarks/ops_e4m3_experts.py. Tiles have room for the routed tokens of most experts, until tensor cores take longer
# than memory.
E4M3_TILES = {
    24: (E4m3Config(128, 32, 1), E4m3Config(128, 32, 1)),
    64: (E4m3Config(128, 64, 1), E4m3Config(128, 64, 1)),
    256: (E4m3Config(128, 192, 1, share=2, matmul=96), E4m3Config(128, 192, 1, matmul=192)),
    1 << 30: (E4m3Config(192, 128, 1), E4m3Config(192, 128, 1)),
}


def choose_e4m3(routed: int, experts: int, w13: Stack, w2: Stack, caps: DeviceCaps) -> Configs | None:
    if not caps.hopper or not all(e4m3_wgmma.takes(one.packed.layout) for one in (w13, w2)):
        return None
    return Configs(*next(configs for most, configs in E4M3_TILES.items() if routed <= most * experts))


# -- launches

Config = ExpertTileConfig | PipelineConfig | WgmmaExpertsConfig | E4m3Config


class Configs(NamedTuple):
    """How both GEMMs are computed; their tiles have the same rows."""

    up: Config
    down: Config

    @property
    def rows(self) -> int:
        return self.up.rows


def sizes(stack: Stack, config: Config, act: str, top: int, bias: bool) -> dict[str, jit.Size]:
    """Compile-time constants of the config's kernel. act: of the gate; "": there is none. top: routed tokens of a row
    of x."""
    layout = stack.packed.layout
    if isinstance(config, E4m3Config):
        _, outputs, inputs = stack.shape
        return packed_gemm.sizes(0, inputs, config, act, bias, layout) | dict(OUTPUTS=outputs)
    if isinstance(config, WgmmaExpertsConfig):
        of = dict(ROWS=config.rows, GROUPS=config.outputs // 128, KC=config.inputs, STAGES=config.stages(layout)[0])
        return sizes_of_gemm(stack, act, 1, bias) | of
    if isinstance(config, PipelineConfig):
        of = dict(WARPS=config.warps, RUN=config.run, STAGES=config.stages, BUFFERS=config.buffers)
    else:
        warps = dict(SUBS=WARPS // config.groups, GROUPS=config.groups)
        of = dict(TILES=config.tiles, **warps, KC=config.inputs, AHEAD=config.ahead)
    return sizes_of_gemm(stack, act, top, bias) | of


def multiply(gemm: Gemm, config: Config) -> None:
    """Fill gemm.y. x of down is in memory that has a tile's rows at least."""
    if isinstance(config, E4m3Config):
        by_e4m3(gemm, config, encode_routed(gemm.x, gemm.groups, gemm.weights, gemm.top, config.rows))
    elif isinstance(config, WgmmaExpertsConfig):
        _by_wgmma(gemm, config)
    elif isinstance(config, PipelineConfig):
        _pipeline(gemm, config)
    else:
        _by_tiles(gemm, config)


def by_e4m3(gemm: Gemm, config: E4m3Config, rows: E4m3Routed) -> None:
    """rows: those of gemm.x."""
    _, outputs, inputs = gemm.stack.shape
    half = inputs // 2  # in elements of two bytes
    of_x = jit.tensor_map(rows.codes.data_ptr(), len(rows.codes), half, config.rows // config.share, half)
    columns = -(-outputs // (config.outputs * config.share))
    blocks = min(gemm.tiles * columns * config.share, blocks_at_once(config.cluster, gemm.num_sms))
    args = of_x, rows.scales, rows.weights, gemm.packed_tiles, gemm.bias_or(gemm.y), *gemm.groups, gemm.y, gemm.tiles
    shared = config.stages()[1]
    kernel = jit.kernel("e4m3_experts", "e4m3_experts", gemm.y.dtype, shared, **gemm.sizes(config))
    kernel((blocks, 1, 1), config.outputs * 2 + 128, *args, shared=shared, cluster=config.cluster)


def _by_wgmma(gemm: Gemm, config: WgmmaExpertsConfig) -> None:
    x, y, (_, outputs, inputs) = gemm.x, gemm.y, gemm.stack.shape
    x = gather(x, gemm.groups, gemm.top, config.rows) if gemm.act else x
    of_x = jit.tensor_map(x.data_ptr(), max(len(x), config.rows), inputs, config.rows, inputs)
    blocks = min(gemm.tiles * -(-outputs // config.outputs), gemm.num_sms)
    args = of_x, gemm.packed_tiles, gemm.bias_or(y), gemm.weights, *gemm.groups, y, gemm.tiles
    shared = config.stages(gemm.layout)[1]
    kernel = jit.kernel("quantized_wgmma_experts", "quantized_wgmma_experts", y.dtype, shared, **gemm.sizes(config))
    kernel((blocks, 1, 1), config.outputs + 128, *args, shared=shared)


def _pipeline(gemm: Gemm, config: PipelineConfig) -> None:
    x, y, n_tiles = gemm.x, gemm.y, -(-gemm.y.shape[1] // N_TILE)
    blocks = min(gemm.num_sms, gemm.tiles * (n_tiles if gemm.act else -(-n_tiles // 2)))
    args = x, gemm.packed_tiles, gemm.bias_or(x), *gemm.groups, gemm.weights, y, gemm.tiles
    shared = config.shared(gemm.stack.shape[2], gemm.layout)
    kernel = jit.kernel("quantized_pipeline", "quantized_pipeline", y.dtype, shared, **gemm.sizes(config))
    kernel((blocks, 1, 1), config.warps * 32 + 32, *args, shared=shared)


def _by_tiles(gemm: Gemm, config: ExpertTileConfig) -> None:
    x, y = gemm.x, gemm.y
    blocks = -(-y.shape[1] // (N_TILE * (WARPS // config.groups)))
    args = x, gemm.packed_tiles, gemm.bias_or(x), *gemm.groups, gemm.weights, y
    shared = config.shared(gemm.stack.shape[2], bool(gemm.act))
    kernel = jit.kernel("quantized_experts", "quantized_experts", y.dtype, shared, **gemm.sizes(config))
    kernel((blocks, gemm.tiles, 1), WARPS * 32, *args, shared=shared)


def experts(given: Inputs, configs: Configs) -> Tensor:
    """[T * k, H], what each routed token's expert makes."""
    x, ids, weights, w13, w2, act, biases, local_experts, _ = given
    assert isinstance(w13, Stack) and isinstance(w2, Stack), "`takes` was not asked"
    groups = group(ids, w13.shape[0], configs.rows, local_experts)
    h = up(x, weights, w13, groups, ids.shape[1], act, configs.up, biases.up)
    return down(h, weights, w2, groups, configs.down, biases.down)


def up(
    x: Tensor, weights: Tensor, w13: Stack, groups: Groups, top: int, act: str, config: Config,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[routed, I] in the order of the groups, which are of the config's rows: the routed tokens' weights * act(gate) *
    up."""
    routed = len(groups.sorted_ids)
    h = x.new_empty(max(routed, config.rows), w13.shape[1] // 2)[:routed]  # in memory that has a tile's rows at least
    multiply(Gemm(x, w13, groups, weights, h, act, top, bias), config)
    return h


def down(h: Tensor, weights: Tensor, w2: Stack, groups: Groups, config: Config, bias: Tensor | None = None) -> Tensor:
    """[routed, H], in the routed tokens' own order, of h [routed, I] in that of the groups."""
    y = h.new_empty(len(h), w2.shape[1])
    multiply(Gemm(h, w2, groups, weights, y, "", 0, bias), config)
    return y
