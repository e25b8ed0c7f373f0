"""GEMMs of a few rows on GPUs, where all time goes into reading the weights."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .. import jit
from ..activation.activation import gate_sizes
from ..device import WHOLE_SHARED, DeviceCaps, device_caps

GEMV_ROWS = 2  # more are faster on tensor cores
HEIGHTS = (32, 48, 64, 96, 112, 128, 192, 224)  # outputs of a tile
LENGTHS = (64, 128, 256)  # inputs of a chunk
SPLITS = (4, 2, 1)  # blocks that share a tile
# Inputs from which on sharing gains more than exchanging the sums costs. On an H200 (2026-11-23), 64 rows: 3584 x 18944
# by four blocks takes 36.0 us instead of 39.1, 4096 x 14336 by two 30.4 instead of 31.2, and 3584 x 3584 by two 9.6
# instead of 9.2.
SPLIT_FROM = 12288
UNEVEN_GAIN = 0.9  # of the time of tiles that divide the outputs
GEMV_SHARED = 96 << 10  # bytes of shared memory for x: two blocks must fit on a multiprocessor
GEMV_WARPS = 8  # of a block
NORMED = 8192  # elements of x that a block has registers for to norm them
MOST_ROWS = 64
WHOLE_FROM = 33  # rows, for which Hopper's instructions for 64 rows are the faster ones
MOST_STAGES = 16


class TileConfig(NamedTuple):
    """The tiles of pipelined_gemm.cu."""

    outputs: int  # of a tile
    inputs: int  # of a chunk
    split: int = 1  # blocks that share a tile, each a part of its inputs: Hopper, from WHOLE_FROM rows on


def supports(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether `skinny_linear` takes x [T, I], weight [O, I] and bias [O], and is the fastest."""
    if not x.is_cuda or x.dim() != 2 or x.element_size() != 2 or not 0 < x.shape[0] <= MOST_ROWS:
        return False
    if x.dtype != weight.dtype or (bias is not None and bias.dtype != x.dtype):
        return False
    return jit.plain(x, weight) and _config(x, weight) is not None


def skinny_linear(x: Tensor, weight: Tensor, gate: str = "", bias: Tensor | None = None) -> Tensor:
    """x [T, I] times the transpose of weight [O, I], plus bias [O], where `supports` says so; accumulated in f32.

    gate: an activation of the first half of the outputs times the second half; "": the outputs as they are.
    """
    config = _config(x, weight)
    if isinstance(config, TileConfig):
        return pipelined(x, weight, config, gate, bias)
    return gemv(x, weight, gate, bias)


def supports_norm(x: Tensor, residual: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether `normed_linear` takes these and is faster than a norm before."""
    if x.numel() > NORMED or not supports(x, weight, bias) or _config(x, weight) != "gemv":
        return False
    return x.dtype == residual.dtype == norm_weight.dtype and jit.plain(residual, norm_weight)


def normed_linear(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    gate: str = "",
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`skinny_linear` of the norm that norm.add_rms_norm makes of x and residual [T, I], as one kernel; and their sum.

    x and residual stay as they are: each block reads them. Squares are added up in another order than there, so that a
    norm's last bit may differ.
    """
    total = torch.empty_like(residual)
    return gemv(x, weight, gate, bias, norm=(residual, norm_weight, eps, total)), total


def variants(
    rows: Iterable[int], weight: Tensor, gate: str, bias: bool, norm: bool, found: DeviceCaps
) -> Iterator[jit.KernelVariant]:
    """What the GEMM of so many rows, each, is compiled as; norm: behind a norm, where `normed_linear` takes it."""
    outputs, inputs = weight.shape
    for n in rows:
        config = _choose(n, outputs, inputs, found) if weight.element_size() == 2 else None
        if isinstance(config, TileConfig):
            whole = whole_tiles(n, found)
            yield jit.variant(
                "pipelined_gemm", weight.dtype, **_pipelined_sizes(n, outputs, inputs, config, gate, bias, whole)
            )
        elif config:
            how = *_gemv_config(n, outputs, found, gate), gate, bias, norm and n * inputs <= NORMED
            yield jit.variant("gemv", weight.dtype, **_gemv_sizes(n, inputs, *how))


def _gemv_config(rows: int, outputs: int, found: DeviceCaps, gate: str) -> tuple[int, int]:
    """Outputs of a warp, and how many accesses it has under way: two where all blocks are there at once, two on each
    multiprocessor."""
    at_once = outputs <= 2 * GEMV_WARPS * 2 * found.num_sms
    return (2, 4) if rows > 1 or gate or at_once else (1, 8)


def _gemv_sizes(rows: int, inputs: int, outs: int, ahead: int, gate: str, bias: bool, norm: bool) -> dict[str, int]:
    return dict(
        I=inputs,
        R=rows,
        OUTS=outs,
        AHEAD=ahead,
        **gate_sizes(gate),
        BIAS=int(bias),
        NORM=int(norm),
        WARPS=GEMV_WARPS,
    )


def _pipelined_sizes(
    rows: int, outputs: int, inputs: int, config: TileConfig, gate: str, bias: bool, whole: bool
) -> dict[str, int]:
    count, _ = stages(config, rows, whole)
    tiles = _row_tiles(rows, whole)
    return dict(
        I=inputs,
        M=config.outputs,
        KC=config.inputs,
        STAGES=count,
        TILES=tiles,
        **gate_sizes(gate),
        BIAS=int(bias),
        WHOLE=int(whole),
        SPLIT=config.split,
        UNEVEN=int(outputs % config.outputs > 0),
    )


def _config(x: Tensor, weight: Tensor) -> TileConfig | Literal["gemv"] | None:
    outputs, inputs = weight.shape
    return _choose(x.shape[0], outputs, inputs, device_caps(x.device))


def _choose(rows: int, outputs: int, inputs: int, found: DeviceCaps) -> TileConfig | Literal["gemv"] | None:
    return choose(rows, outputs, inputs, found.num_sms, found.has_tma, whole_tiles(rows, found))


def whole_tiles(rows: int, found: DeviceCaps) -> bool:
    """Whether tiles take all 64 rows by Hopper's instructions."""
    return found.hopper and rows >= WHOLE_FROM


@functools.cache
def choose(
    rows: int, outputs: int, inputs: int, num_sms: int, staging: bool, whole: bool = False
) -> TileConfig | Literal["gemv"] | None:
    """The fastest config for these sizes; None: the library's. whole: tiles take all 64 rows."""
    if rows <= GEMV_ROWS and inputs % 512 == 0 and outputs % 64 == 0 and rows * inputs * 2 <= GEMV_SHARED:
        return "gemv"
    if not staging:
        return None
    # One tile for each multiprocessor, or some in turn, up to 128 high: as many as the busiest one has, each as long as
    # its outputs take to be read, and x as a quarter as many (measured on an H200 on 2026-11-23, 37888 outputs: of 16
    # rows 8 layers take 999 us at 32, 1012 at 64 and 1050 at 128, of 64 rows 1156, 1144 and 1177).
    padded = 8 * _row_tiles(rows, False)

    def time(height: int) -> float:
        return -(-outputs // height // num_sms) * (height + padded / 4)

    heights = [h for h in HEIGHTS if h <= 128 or -(-outputs // h) <= num_sms]
    height = min((h for h in heights if outputs % h == 0), key=time, default=0)
    if outputs >= HEIGHTS[0] * num_sms:  # a last tile of fewer outputs costs little where tiles are many
        uneven = min(heights, key=time)
        if not height or (whole and inputs < SPLIT_FROM and time(uneven) < UNEVEN_GAIN * time(height)):
            height = uneven
    for split in SPLITS if whole and inputs >= SPLIT_FROM else (1,):
        length = _length(height * split, inputs // split)
        if height and length and _splits(height * split, outputs, inputs, num_sms, split):
            return TileConfig(height * split, length, split)
    return None


def _length(height: int, inputs: int) -> int:
    """The longest chunk for a tile of this height; 0: none divides the inputs."""
    lengths = (256, 128, 64) if height <= 64 else (128, 64) if height <= 128 else (64,)
    return next((length for length in lengths if inputs % length == 0), 0)


def _splits(height: int, outputs: int, inputs: int, num_sms: int, split: int) -> bool:
    """Whether so many blocks may share each tile of this height. All clusters must be there at once; of four blocks an
    H200 takes 28 and more, but not 32 (2026-11-23), as one lies within a part of the GPU."""
    at_once = outputs // height * split <= (num_sms * 7 // 8 if split > 2 else num_sms)
    even = outputs % height == height % (8 * split) == inputs % split == 0
    return split == 1 or (at_once and even and height in HEIGHTS)


def tile_configs(rows: int, outputs: int, inputs: int, num_sms: int, whole: bool) -> Iterator[TileConfig]:
    """All that `pipelined` takes for these sizes. whole: tiles take all 64 rows, so that blocks may share one."""
    for config in itertools.starmap(TileConfig, itertools.product(HEIGHTS, LENGTHS, SPLITS if whole else (1,))):
        divides = inputs % (config.inputs * config.split) == 0
        fits = rows <= MOST_ROWS and stages(config, rows, whole)[0] > 1
        if fits and divides and _splits(config.outputs, outputs, inputs, num_sms, config.split):
            yield config


def gemv(
    x: Tensor,
    weight: Tensor,
    gate: str = "",
    bias: Tensor | None = None,
    norm: tuple[Tensor, Tensor, float, Tensor] | None = None,
    config: tuple[int, int] | None = None,
) -> Tensor:
    """norm: of x and this residual, by this weight and epsilon, which leaves their sum here.

    config: outputs of a warp, two with a `gate`, and accesses to each row that it has under way; chosen unless given.
    """
    (rows, inputs), outputs = x.shape, weight.shape[0]
    outs, ahead = config or _gemv_config(rows, outputs, device_caps(x.device), gate)
    y = x.new_empty(rows, outputs // 2 if gate else outputs)
    sizes = _gemv_sizes(rows, inputs, outs, ahead, gate, bias is not None, norm is not None)
    kernel = jit.kernel("gemv", "gemv", x.dtype, x.nbytes, **sizes)
    residual, norm_weight, eps, total = norm or (x, x, 0.0, x)  # what a kernel without does not touch
    grid = outputs // (GEMV_WARPS * outs), 1, 1
    kernel(
        grid, GEMV_WARPS * 32, x, weight, x if bias is None else bias, y, outputs, residual, norm_weight, float(eps),
        total, shared=x.nbytes,
    )  # fmt: skip
    return y


def pipelined(x: Tensor, weight: Tensor, config: TileConfig, gate: str = "", bias: Tensor | None = None) -> Tensor:
    """By tensor cores, a block on each multiprocessor."""
    (rows, inputs), outputs = x.shape, weight.shape[0]
    found = device_caps(x.device)
    whole = whole_tiles(rows, found)
    _, shared = stages(config, rows, whole)
    y = x.new_empty(rows, outputs // 2 if gate else outputs)
    kernel = jit.kernel(
        "pipelined_gemm", "pipelined_gemm", x.dtype, shared,
        **_pipelined_sizes(rows, outputs, inputs, config, gate, bias is not None, whole),
    )  # fmt: skip
    blocks = min(-(-outputs // config.outputs) * config.split, found.num_sms)
    threads = 32 + 32 * (4 if whole else config.outputs // 16 * _groups(config))
    of_x = jit.tensor_map(x.data_ptr(), rows, inputs, rows, inputs)
    of_w = jit.tensor_map(weight.data_ptr(), outputs, inputs, config.outputs // 2 if gate else config.outputs, inputs)
    kernel((blocks, 1, 1), threads, of_x, of_w, x if bias is None else bias, y, rows, outputs,
           shared=shared, cluster=config.split)  # fmt: skip
    return y


def _row_tiles(rows: int, whole: bool) -> int:
    return 8 if whole else next(tiles for tiles in (1, 2, 4, 8) if rows <= 8 * tiles)


def _groups(config: TileConfig) -> int:
    """Warps that share a subtile of 16 outputs, as pipelined_gemm.cu has them."""
    return 1 if config.outputs > 64 else 2 if config.outputs > 32 else 4


def stages(config: TileConfig, rows: int, whole: bool = False) -> tuple[int, int]:
    """Chunks that a block holds at once, and all bytes of its shared memory, as pipelined_gemm.cu lays it out."""
    padded = 8 * _row_tiles(rows, whole)
    sums = 0 if whole else _groups(config) * config.outputs * (padded + 1) * 4
    if config.split > 1:
        sums = padded * (config.outputs + 8) * 4
    stage = (config.outputs + padded) * config.inputs * 2
    count = min((WHOLE_SHARED - 1024 - sums) // stage, MOST_STAGES)
    return count, 1024 + count * stage + sums
