"""Quantised experts of some pairs on Hopper: weights become 16 bits on their way to tensor cores.

Once for all pairs of a tile, so that a tile has room for the pairs of most experts. Rows of x are gathered first
(gather_pairs.py), so that those of an expert are rows side by side, which TMA brings.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import Tensor

from .. import jit
from ..device import WHOLE_SHARED, DeviceCaps, device_caps
from ..quantized import e4m3_wide, pieces_cuda
from ..quantized.pieces_cuda import STRIP, Layout
from ..quantized.stack import Stack
from . import gather_pairs, quantized_pipeline
from .group import Groups

# Pairs per expert: of more it is taken. Of 4 the pipeline takes 10 % less of int4 and 18 % less of Q4_K
# (Qwen3-30B-A3B); of 8 18 % more, 5 % more and, of MXFP4 (gpt-oss-20b), 24 % more; 6 lies between (H200, 2026-11-27,
# benchmarks/ops_moe.py; as is what follows).
LEAST_PAIRS = 6
# Most pairs per expert → pairs of a tile. An expert seldom has two tiles, each of which makes its weights anew. Timed
# of 8, 16, 32 and 64. moe.tiling_rows has the same borders.
TILES = {10: 16, 24: 32, 32: 48, 48: 64, 64: 96, 1 << 30: 128}
# Outputs of a tile. Of 384 tiles of up to 32 pairs took 4 to 6 % less of MXFP4 than of 256, where as few waves of
# blocks make as many outputs; tiles of 48 pairs and more took up to 16 % longer. 512 took 5 % less of Q4_K, and 37 %
# more of MXFP4.
OUTPUTS, MORE_OUTPUTS, MOST_ROWS_OF_MORE = 256, 384, 32
LENGTHS = (320, 256, 192, 128, 64)  # inputs of a chunk
LEAST_STAGES, MOST_STAGES = 4, 16


class WgmmaExpertsConfig(NamedTuple):
    """The tiles of quantized_wgmma_experts.cu."""

    rows: int  # pairs of one expert: of TILES
    outputs: int  # of the weights: 128 of each warpgroup
    inputs: int  # of a chunk


def takes(w13: object, w2: object, found: DeviceCaps) -> bool:
    """Whether these are the weights and the GPU for it."""
    return found.hopper and _in_pieces(w13) and _in_pieces(w2)


def _in_pieces(stack: object) -> bool:
    packed = stack.packed if isinstance(stack, Stack) else None
    if not isinstance(stack, Stack) or not isinstance(packed, pieces_cuda.Packed):
        return False
    # A box of x has 64 inputs. Those of e4m3_wide are the first operand in shared memory (e4m3_experts.py).
    return packed.layout.header != e4m3_wide.LAYOUT.header and stack.shape[2] % max(64, packed.layout.inputs) == 0


def choose(
    pairs: int, experts: int, w13: Stack, w2: Stack, num_sms: int
) -> tuple[WgmmaExpertsConfig, WgmmaExpertsConfig]:
    """For gate and up, and for down, of so many pairs of all experts."""
    rows = next(rows for most, rows in TILES.items() if pairs <= most * experts)
    return config(rows, _outputs(rows, w13, num_sms), w13), config(rows, _outputs(rows, w2, num_sms), w2)


def _outputs(rows: int, stack: Stack, num_sms: int) -> int:
    """More where blocks have no more to do then, with a tile for each expert."""

    def work(outputs: int) -> int:
        return -(-stack.shape[0] * -(-stack.shape[1] // outputs) // num_sms) * outputs

    return MORE_OUTPUTS if rows <= MOST_ROWS_OF_MORE and work(MORE_OUTPUTS) <= work(OUTPUTS) else OUTPUTS


def config(rows: int, outputs: int, stack: Stack) -> WgmmaExpertsConfig:
    """With the longest chunks of which LEAST_STAGES fit."""
    return WgmmaExpertsConfig(rows, outputs, _length(rows, outputs, stack.shape[2], stack.packed.layout))


@functools.cache
def _length(rows: int, outputs: int, inputs: int, layout: Layout) -> int:
    fitting = (
        n
        for n in LENGTHS
        if inputs % n == n % layout.inputs == 0
        and stages(WgmmaExpertsConfig(rows, outputs, n), layout)[0] >= LEAST_STAGES
    )
    return next(fitting)


def stages(config: WgmmaExpertsConfig, layout: Layout) -> tuple[int, int]:
    """Chunks that a block holds at once, and all bytes of its shared memory, as quantized_wgmma_experts.cu lays it
    out."""
    of_chunk = config.inputs // layout.inputs
    stage = -(-(config.rows * config.inputs * 2 + config.outputs // STRIP * of_chunk * layout.bytes) // 1024) * 1024
    count = min((WHOLE_SHARED - 2048) // stage, MOST_STAGES)  # 2048: to begin at a multiple of 1024, and barriers
    return count, 1024 + count * stage


def sizes(stack: Stack, config: WgmmaExpertsConfig, act: str, bias: bool) -> dict[str, jit.Size]:
    """What quantized_wgmma_experts.cu is compiled for. act: of the gate; "": there is none."""
    return quantized_pipeline.sizes_of_gemm(stack, act, 1, bias) | dict(
        ROWS=config.rows, GROUPS=config.outputs // 128, KC=config.inputs, STAGES=stages(config, stack.packed.layout)[0]
    )


def launch(
    x: Tensor, stack: Stack, groups: Groups, weights: Tensor, y: Tensor, act: str, top: int, config: WgmmaExpertsConfig,
    bias: Tensor | None,
) -> None:  # fmt: skip
    """As `quantized_cuda.expert_up`, with an activation, or `expert_down` make y; x of the latter is in memory that
    has a tile's rows at least."""
    if act:
        x = gather_pairs.gather(x, groups, top, config.rows)
    _, outputs, inputs = stack.shape
    _, shared = stages(config, stack.packed.layout)
    of = sizes(stack, config, act, bias is not None)
    kernel = jit.kernel("quantized_wgmma_experts", "quantized_wgmma_experts", x.dtype, shared, **of)
    of_x = jit.tensor_map(x.data_ptr(), max(len(x), config.rows), inputs, config.rows, inputs)
    tiles = len(groups.tile_expert)
    blocks = min(tiles * -(-outputs // config.outputs), device_caps(y.device).num_sms)
    args = of_x, stack.packed.pieces, y if bias is None else bias, weights, *groups, y, tiles
    kernel((blocks, 1, 1), config.outputs + 128, *args, shared=shared)
