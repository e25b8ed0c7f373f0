"""FP8 experts of more than a few pairs on Hopper: x becomes e4m3, too, and tensor cores multiply in 8 bits.

As linears do (kernels/quantized/e4m3_wgmma.py), whose configs these are; each tile has pairs of one expert.
"""

from __future__ import annotations

from torch import Tensor

from .. import jit
from ..device import DeviceCaps, device_caps
from ..quantized import e4m3_wgmma, e4m3_wide, pieces_cuda
from ..quantized.e4m3_wgmma import E4m3Config
from ..quantized.quantized_wgmma import blocks_at_once
from ..quantized.stack import Stack
from . import e4m3_pairs
from .e4m3_pairs import E4m3Pairs
from .group import Groups

MOST_OF_16_BITS = 4  # pairs per expert up to which quantized_pipeline.cu, which leaves x as it is, is as fast
# Most pairs per expert → configs of both GEMMs, which have the same rows: on an H200, by
# benchmarks/ops_e4m3_experts.py. Tiles have room for the pairs of most experts, until tensor cores take longer than
# memory. moe.tiling_rows has the same borders.
TILES = {
    24: (E4m3Config(128, 32, 1), E4m3Config(128, 32, 1)),
    64: (E4m3Config(128, 64, 1), E4m3Config(128, 64, 1)),
    256: (E4m3Config(128, 192, 1, share=2, matmul=96), E4m3Config(128, 192, 1, matmul=192)),
    1 << 30: (E4m3Config(192, 128, 1), E4m3Config(192, 128, 1)),
}


def takes(w13: object, w2: object, found: DeviceCaps) -> bool:
    """Whether these are the weights and the GPU for it."""
    return found.hopper and _wide(w13) and _wide(w2)


def _wide(stack: object) -> bool:
    packed = stack.packed if isinstance(stack, Stack) else None
    return isinstance(packed, pieces_cuda.Packed) and packed.layout.header == e4m3_wide.LAYOUT.header


def choose(pairs: int, experts: int) -> tuple[E4m3Config, E4m3Config]:
    """For gate and up, and for down, of so many pairs of all experts."""
    return next(configs for most, configs in TILES.items() if pairs <= most * experts)


def sizes(stack: Stack, config: E4m3Config, act: str, bias: bool) -> dict[str, jit.Size]:
    """What e4m3_experts.cu is compiled for. act: of the gate; "": there is none."""
    _, outputs, inputs = stack.shape
    return e4m3_wgmma.sizes(inputs, config, act, bias, stack.packed.layout.alike) | dict(OUTPUTS=outputs)


def launch(
    x: Tensor, stack: Stack, groups: Groups, weights: Tensor, y: Tensor, act: str, top: int, config: E4m3Config,
    bias: Tensor | None,
) -> None:  # fmt: skip
    """As `quantized_cuda.expert_up`, with an activation, or `expert_down` make y."""
    rows = e4m3_pairs.encode(x, groups, weights, top if act else 0, config.rows)
    multiply(rows, stack, groups, y, act, config, bias)


def multiply(
    rows: E4m3Pairs, stack: Stack, groups: Groups, y: Tensor, act: str, config: E4m3Config, bias: Tensor | None = None
) -> None:
    """Fill y [P, outputs]."""
    _, outputs, inputs = stack.shape
    _, shared = e4m3_wgmma.stages(config)
    kernel = jit.kernel("e4m3_experts", "e4m3_experts", y.dtype, shared, **sizes(stack, config, act, bias is not None))
    half = inputs // 2  # in elements of two bytes
    of_x = jit.tensor_map(rows.codes.data_ptr(), len(rows.codes), half, config.rows // config.share, half)
    tiles, columns = len(groups.tile_expert), -(-outputs // (config.outputs * config.share))
    blocks = min(tiles * columns * config.share, blocks_at_once(config.cluster, device_caps(y.device).num_sms))
    args = of_x, rows.scales, rows.weights, stack.packed.pieces, y if bias is None else bias, *groups, y, tiles
    kernel((blocks, 1, 1), config.outputs * 2 + 128, *args, shared=shared, cluster=config.cluster)
