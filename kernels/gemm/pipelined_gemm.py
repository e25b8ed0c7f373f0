"""The kernel pipelined_gemm.cu: GEMMs of up to 64 rows on tensor cores, which TMA brings the weights to."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from .. import jit
from ..activation.activation import gate_sizes
from ..candidate import Candidate
from ..device import WHOLE_SHARED, DeviceCaps, device_caps
from .gemv import readable

HEIGHTS = (32, 48, 64, 96, 112, 128, 192, 224)  # outputs of a tile
LENGTHS = (64, 128, 256)  # inputs of a chunk
MAX_ROWS = 64
WHOLE_FROM = 33  # rows, for which Hopper's instructions for 64 rows are the faster ones
MAX_STAGES = 16
UNEVEN_GAIN = 0.9  # of the time of tiles that divide the outputs


class TileConfig(NamedTuple):
    """How a GEMM is cut into tiles."""

    outputs: int  # of a tile
    inputs: int  # of a chunk


def supports(x: Tensor, weight: Tensor, gate: str = "", bias: Tensor | None = None) -> bool:
    if not 0 < len(x) <= MAX_ROWS or not readable(x, weight, bias):
        return False
    return choose_config(len(x), weight, device_caps(x.device)) is not None


def variant(rows: int, weight: Tensor, gate: str, bias: bool, caps: DeviceCaps) -> jit.KernelVariant | None:
    config = choose_config(rows, weight, caps) if weight.element_size() == 2 else None
    if config is None:
        return None
    outputs, inputs = weight.shape
    made = sizes(rows, outputs, inputs, config, gate, bias, whole_tiles(rows, caps))
    return jit.variant("pipelined_gemm", weight.dtype, **made)


def choose_config(rows: int, weight: Tensor, caps: DeviceCaps) -> TileConfig | None:
    if not 0 < rows <= MAX_ROWS or not caps.has_tma:
        return None
    outputs, inputs = weight.shape
    return choose(rows, outputs, inputs, caps.num_sms, whole_tiles(rows, caps))


@functools.cache
def choose(rows: int, outputs: int, inputs: int, num_sms: int, whole: bool = False) -> TileConfig | None:
    """The fastest config for these sizes; None: the library's. whole: tiles take all 64 rows."""
    # One tile for each multiprocessor, or several in sequence, up to 128 high: as many as the busiest one has, each as
    # long as its outputs take to be read, and x as a quarter as many (measured on an H200 on 2026-11-23, 37888 outputs:
    # of 16 rows 8 layers take 999 us at 32, 1012 at 64 and 1050 at 128, of 64 rows 1156, 1144 and 1177).
    padded = 8 * row_tiles(rows, False)

    def time(height: int) -> float:
        return -(-outputs // height // num_sms) * (height + padded / 4)

    heights = [h for h in HEIGHTS if h <= 128 or -(-outputs // h) <= num_sms]
    height = min((h for h in heights if outputs % h == 0), key=time, default=0)
    if outputs >= HEIGHTS[0] * num_sms:  # a last tile of fewer outputs costs little where tiles are many
        uneven = min(heights, key=time)
        if not height or (whole and time(uneven) < UNEVEN_GAIN * time(height)):
            height = uneven
    length = _length(height, inputs)
    return TileConfig(height, length) if height and length else None


def _length(height: int, inputs: int) -> int:
    """The longest chunk for a tile of this height; 0: none divides the inputs."""
    lengths = (256, 128, 64) if height <= 64 else (128, 64) if height <= 128 else (64,)
    return next((length for length in lengths if inputs % length == 0), 0)


def pipelined_gemm(
    x: Tensor, weight: Tensor, gate: str = "", bias: Tensor | None = None, config: TileConfig | None = None
) -> Tensor:
    """x [T, I] times the transpose of weight [O, I], as gemv.gemv; a block on each multiprocessor. config: chosen
    unless given."""
    (rows, inputs), outputs = x.shape, weight.shape[0]
    found = device_caps(x.device)
    config = config or choose_config(rows, weight, found)
    assert config is not None
    whole = whole_tiles(rows, found)
    _, shared = stages(config, rows, whole)
    y = x.new_empty(rows, outputs // 2 if gate else outputs)
    kernel = jit.kernel(
        "pipelined_gemm", "pipelined_gemm", x.dtype, shared,
        **sizes(rows, outputs, inputs, config, gate, bias is not None, whole),
    )  # fmt: skip
    blocks = min(-(-outputs // config.outputs), found.num_sms)
    threads = 32 + 32 * (4 if whole else config.outputs // 16 * _groups(config))
    of_x = jit.tensor_map(x.data_ptr(), rows, inputs, rows, inputs)
    of_w = jit.tensor_map(weight.data_ptr(), outputs, inputs, config.outputs // 2 if gate else config.outputs, inputs)
    kernel((blocks, 1, 1), threads, of_x, of_w, x if bias is None else bias, y, rows, outputs, shared=shared)
    return y


def sizes(
    rows: int, outputs: int, inputs: int, config: TileConfig, gate: str, bias: bool, whole: bool
) -> dict[str, int]:
    """Compile-time constants of pipelined_gemm.cu. whole: tiles take all 64 rows."""
    count, _ = stages(config, rows, whole)
    tiles = row_tiles(rows, whole)
    return dict(
        I=inputs,
        M=config.outputs,
        KC=config.inputs,
        STAGES=count,
        TILES=tiles,
        **gate_sizes(gate),
        BIAS=int(bias),
        WHOLE=int(whole),
        UNEVEN=int(outputs % config.outputs > 0),
    )


def whole_tiles(rows: int, caps: DeviceCaps) -> bool:
    """Whether tiles take all 64 rows by Hopper's instructions."""
    return caps.hopper and rows >= WHOLE_FROM


def tile_configs(rows: int, inputs: int, whole: bool) -> Iterator[TileConfig]:
    """All that `pipelined_gemm` takes for these sizes. whole: tiles take all 64 rows."""
    for config in itertools.starmap(TileConfig, itertools.product(HEIGHTS, LENGTHS)):
        if rows <= MAX_ROWS and inputs % config.inputs == 0 and stages(config, rows, whole)[0] > 1:
            yield config


def row_tiles(rows: int, whole: bool) -> int:
    """The number of 8-row tiles in a block's tile."""
    return 8 if whole else next(tiles for tiles in (1, 2, 4, 8) if rows <= 8 * tiles)


def _groups(config: TileConfig) -> int:
    """Warps that share a subtile of 16 outputs, as pipelined_gemm.cu has them."""
    return 1 if config.outputs > 64 else 2 if config.outputs > 32 else 4


def stages(config: TileConfig, rows: int, whole: bool = False) -> tuple[int, int]:
    """Chunks that a block holds at once, and all bytes of its shared memory, as pipelined_gemm.cu lays it out."""
    padded = 8 * row_tiles(rows, whole)
    sums = 0 if whole else _groups(config) * config.outputs * (padded + 1) * 4
    stage = (config.outputs + padded) * config.inputs * 2
    count = min((WHOLE_SHARED - 1024 - sums) // stage, MAX_STAGES)
    return count, 1024 + count * stage + sums


CANDIDATE = Candidate(
    "pipelined_gemm.cu", "sm_90, sm_100", f"up to {MAX_ROWS} rows of f16 or bf16", supports, pipelined_gemm, variant
)
