"""GEMVs of few rows on sm_90 and sm_100: of formats with a scale for each 16 or 32 inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from .. import jit
from ..activation.activation import gate_sizes
from ..device import device_caps

if TYPE_CHECKING:
    from .pieces_cuda import Layout, Packed

MOST_ROWS = 4
MOST_INPUTS = 16384  # of several rows together: of more, too few stages fit beside x, and quantized_gemm.cu is faster
WARPS = 8  # of a block, with a part of each strip
BLOCKS = 2  # on a multiprocessor
RUNS = (4, 2)
# Bytes of a block's shared memory: two fit on a multiprocessor.
SHARED = 110 << 10
LEAST_STAGES, MOST_STAGES = 2, 6


class GroupedConfig(NamedTuple):
    """How grouped_gemv.cu shares out a GEMV."""

    strips: int  # of a tile: two with a gate
    run: int  # pieces of a strip that a warp takes at once


def choose(rows: int, inputs: int, layout: Layout, gated: bool) -> GroupedConfig | None:
    """The longest run that is whole and of which enough stages fit; None: the kernel does not take these sizes."""
    if rows > 1 and rows * inputs > MOST_INPUTS:
        return None
    return next(configs(rows, inputs, layout, gated), None)


def configs(rows: int, inputs: int, layout: Layout, gated: bool) -> Iterator[GroupedConfig]:
    """All that the kernel takes."""
    group = dict(layout.sizes).get("GROUP", 0)
    if layout.header != "super_blocks" or not 0 < rows <= MOST_ROWS or inputs % layout.inputs:
        return
    unit, pieces = 8 // columns(rows) * group, inputs // layout.inputs
    for run in RUNS:
        config = GroupedConfig(1 + gated, run)
        whole = pieces % run == run * layout.inputs % unit == unit % layout.inputs == 0
        if whole and stages(config, rows, inputs, layout)[0] >= LEAST_STAGES:
            yield config


def columns(rows: int) -> int:
    """Of a group, as tensor cores have them."""
    return rows if rows < 3 else MOST_ROWS


def stages(config: GroupedConfig, rows: int, inputs: int, layout: Layout) -> tuple[int, int]:
    """A warp's stages, and all bytes of a block's shared memory, as grouped_gemv.cu lays it out."""
    groups = rows * inputs // dict(layout.sizes)["GROUP"]
    fixed = 16 + rows * (inputs * 2 + 16) + -(-groups // 4) * 16 + 2 * config.strips * WARPS * 256
    stage = WARPS * config.strips * config.run * layout.bytes
    count = min((SHARED - fixed) // stage, MOST_STAGES)
    return count, fixed + count * stage


def gemv(x: Tensor, packed: Packed, config: GroupedConfig, gate: str = "", bias: Tensor | None = None) -> Tensor:
    """Of up to MOST_ROWS rows; a gate takes two strips."""
    rows, inputs = x.shape
    y = x.new_empty(rows, packed.outputs // 2 if gate else packed.outputs)
    _, shared = stages(config, rows, inputs, packed.layout)
    of = sizes(rows, inputs, config, gate, bias is not None, packed.layout)
    kernel = jit.kernel("grouped_gemv", "grouped_gemv", x.dtype, shared, **of)
    blocks = min(len(packed.pieces) // config.strips, BLOCKS * device_caps(x.device).num_sms)
    args = x, packed.pieces, x if bias is None else bias, y, packed.outputs
    kernel((blocks, 1, 1), WARPS * 32, *args, shared=shared)
    return y


def sizes(rows: int, inputs: int, config: GroupedConfig, gate: str, bias: bool, layout: Layout) -> dict[str, jit.Size]:
    """What grouped_gemv.cu is compiled for."""
    return dict(
        **layout.constants,
        I=inputs,
        R=rows,
        STRIPS=config.strips,
        WARPS=WARPS,
        RUN=config.run,
        STAGES=stages(config, rows, inputs, layout)[0],
        BLOCKS=BLOCKS,
        **gate_sizes(gate),
        BIAS=int(bias),
    )
