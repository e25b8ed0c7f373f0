"""Quantised experts with few pairs each on sm_90 and sm_100, where all time goes into reading weights."""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import Tensor

from .. import jit
from ..activation.activation import gate_sizes
from ..device import WHOLE_SHARED, device_caps
from ..quantized import e4m3_wide, int4_cuda, mxfp4_cuda, super_blocks_cuda
from ..quantized.pieces_cuda import STRIP, Layout
from ..quantized.stack import Stack
from .group import Groups

# Formats that it reads faster than quantized_experts.cu does: not those with a scale for each 32 codes of 8 bits.
HEADERS = int4_cuda.HEADER, super_blocks_cuda.HEADER, mxfp4_cuda.HEADER, e4m3_wide.LAYOUT.header
# That multiply, each with a ring: with one that brings x, four for each scheduler. 11 take 2 % less of Q4_K with 16 and
# 64 tokens and 4 % more with one; 12 take 7 to 9 % more of FP8 with 1 to 64, and fewer warps more than that.
WARPS = 15
FEWER = 12, 8  # where rings of so many do not fit beside x, as of FP8 with 7168 inputs
ROWS = 8  # of x in a tile
PART = 2600  # bytes of a copy, at most
LEAST_AHEAD = 48 << 10  # bytes of a block that are under way while each warp multiplies: fewer are slower than memory
MOST_STAGES = 8


class PipelineConfig(NamedTuple):
    """How a block holds weights and x."""

    warps: int
    run: int  # pieces of each of two strips in a stage
    stages: int  # of a warp's ring
    buffers: int  # of x

    @property
    def rows(self) -> int:
        return ROWS


@functools.cache
def choose(inputs: int, layout: Layout, warps: int = WARPS) -> PipelineConfig | None:
    """Long runs, where enough of them fit beside x. None: they do not, or the format is slower here."""
    if layout.header not in HEADERS:
        return None
    pieces = inputs // layout.inputs
    for buffers in (2, 1):
        room = (WHOLE_SHARED - buffers * _bytes_of_x(inputs)) // warps
        for run in (n for n in (8, 4, 3, 2, 1) if pieces % n == 0 and n * layout.bytes <= PART):
            stage = 2 * run * layout.bytes
            stages = min(room // stage, MOST_STAGES)
            if stages == MOST_STAGES or (stages - 1) * stage * warps >= LEAST_AHEAD:
                return PipelineConfig(warps, run, stages, buffers)
    return None


def shared(config: PipelineConfig, inputs: int, layout: Layout) -> int:
    """Bytes of shared memory, as quantized_pipeline.cu lays it out."""
    rings = config.warps * config.stages * 2 * config.run * layout.bytes
    return rings + config.buffers * _bytes_of_x(inputs)


def _bytes_of_x(inputs: int) -> int:
    """Of a tile, with its sums, which most formats leave out."""
    return ROWS * (inputs * 2 + 16) + inputs


def sizes(stack: Stack, config: PipelineConfig, act: str, top: int, bias: bool) -> dict[str, jit.Size]:
    """What quantized_pipeline.cu is compiled for. act: of the gate; "": there is none."""
    return sizes_of_gemm(stack, act, top, bias) | dict(
        WARPS=config.warps, RUN=config.run, STAGES=config.stages, BUFFERS=config.buffers
    )


def sizes_of_gemm(stack: Stack, act: str, top: int, bias: bool) -> dict[str, jit.Size]:
    """What every kernel of quantised experts is compiled for, whatever its tiles."""
    layout: Layout = stack.packed.layout
    return dict(
        FORMAT=layout.header,
        **dict(layout.sizes),
        I=stack.shape[2],
        OUTPUTS=stack.shape[1],
        TOP=top,
        **gate_sizes(act),
        BIAS=int(bias),
    )


def launch(
    x: Tensor, stack: Stack, groups: Groups, weights: Tensor, y: Tensor, act: str, top: int, config: PipelineConfig,
    bias: Tensor | None,
) -> None:  # fmt: skip
    """As `quantized_cuda.expert_up`, with an activation, or `expert_down` make y."""
    memory = shared(config, stack.shape[2], stack.packed.layout)
    of = sizes(stack, config, act, top, bias is not None)
    kernel = jit.kernel("quantized_pipeline", "quantized_pipeline", x.dtype, memory, **of)
    tiles = len(groups.tile_expert)
    strips = -(-y.shape[1] // STRIP)
    blocks = min(device_caps(x.device).num_sms, tiles * (strips if act else -(-strips // 2)))
    args = x, stack.packed.pieces, x if bias is None else bias, *groups, weights, y, tiles
    kernel((blocks, 1, 1), config.warps * 32 + 32, *args, shared=memory)
