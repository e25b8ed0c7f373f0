"""How grouped_gemv.cu shares out a GEMV of few rows: of formats with a scale for each 16 or 32 inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ..device import DeviceCaps
    from .pieces_cuda import Layout

MOST_ROWS = 4
# Bytes of a block's shared memory: two fit on a multiprocessor.
SHARED = 110 << 10
LEAST_STAGES, MOST_STAGES = 2, 6


class GroupedConfig(NamedTuple):
    """How grouped_gemv.cu shares out a GEMV."""

    strips: int  # of a tile
    warps: int  # of a block, with a part of each strip
    run: int  # pieces of a strip that a warp takes at once
    blocks: int  # that fit on a multiprocessor
    started: int  # of these, how many are


def choose(rows: int, inputs: int, layout: Layout, gated: bool, found: DeviceCaps) -> GroupedConfig | None:
    """None: the kernel does not take these sizes."""
    return next(configs(rows, inputs, layout, gated), None) if found.has_tma else None


def configs(rows: int, inputs: int, layout: Layout, gated: bool) -> Iterator[GroupedConfig]:
    """All that are worth a try, the likeliest first."""
    group = dict(layout.sizes).get("GROUP", 0)
    if layout.header != "super_blocks" or not 0 < rows <= MOST_ROWS or inputs % layout.inputs:
        return
    unit, pieces = 8 // columns(rows) * group, inputs // layout.inputs
    for warps, started in ((8, 2), (8, 1), (16, 1)):
        for run in (4, 2, 1):
            way = GroupedConfig(1 + gated, warps, run, 2, started)
            whole = pieces % run == run * layout.inputs % unit == unit % layout.inputs == 0
            if whole and stages(way, rows, inputs, layout)[0] >= LEAST_STAGES:
                yield way


def columns(rows: int) -> int:
    """Of a group, as tensor cores have them."""
    return rows if rows < 3 else MOST_ROWS


def stages(way: GroupedConfig, rows: int, inputs: int, layout: Layout) -> tuple[int, int]:
    """A warp's stages, and all bytes of a block's shared memory, as grouped_gemv.cu lays it out."""
    groups = rows * inputs // dict(layout.sizes)["GROUP"]
    fixed = 16 + rows * (inputs * 2 + 16) + -(-groups // 4) * 16 + 2 * way.strips * way.warps * 256
    stage = way.warps * way.strips * way.run * layout.bytes
    count = min((SHARED - fixed) // stage, MOST_STAGES)
    return count, fixed + count * stage


def sizes(way: GroupedConfig, rows: int, inputs: int, layout: Layout) -> dict[str, int]:
    return dict(
        I=inputs,
        R=rows,
        STRIPS=way.strips,
        WARPS=way.warps,
        RUN=way.run,
        STAGES=stages(way, rows, inputs, layout)[0],
        BLOCKS=way.blocks,
    )


def blocks(way: GroupedConfig, strips: int, num_sms: int) -> int:
    """strips: of W."""
    return min(-(-strips // way.strips), way.started * num_sms)
