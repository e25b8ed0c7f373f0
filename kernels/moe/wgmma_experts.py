"""Grouped GEMMs of experts with many pairs each on Hopper, where all time goes into multiplying: 16-bit weights.

Pairs are gathered first (gather_pairs.py), so that those of an expert are rows side by side, which TMA brings.
"""

from __future__ import annotations

from torch import Tensor

from .. import jit
from ..activation.activation import gate_sizes
from ..device import device_caps
from ..quantized.floats import Floats
from ..quantized.stack import Stack
from . import dequantized
from .group import Groups

OUTPUTS = 256  # of the weights in a tile
CHUNK = 64  # inputs that a block multiplies at once
MOST_SHARED = 227 << 10  # bytes of shared memory that a block may have on Hopper
# Most pairs per expert → pairs of a tile, 128 or 192 (H200, 2026-11-26, benchmarks/ops_moe.py). Of 128 pairs most
# experts have one tile of 192, which takes 6 % less of a layer of Qwen3-30B-A3B than tiles of 128; of 256 it takes 23 %
# more, and of 512, also of Mixtral-8x7B, as long within 4 %.
ROWS = {160: 192, 1 << 30: 128}


def takes(x: Tensor, w13: Tensor | Floats | Stack, w2: Tensor | Floats | Stack, pairs: int, experts: int) -> bool:
    """Whether these kernels multiply so many pairs of experts that are plain, or become so some at a time."""
    many = x.is_cuda and x.element_size() == 2 and pairs > dequantized.LEAST_PAIRS * experts
    if not many or any(length % CHUNK for length in w2.shape[1:]) or not device_caps(x.device).hopper:
        return False
    return all(isinstance(w, Stack) or _plain(w, x) for w in (w13, w2))


def _plain(weight: Tensor | Floats, x: Tensor) -> bool:
    return isinstance(weight, Tensor) and weight.dtype == x.dtype and jit.plain(weight)


def choose_rows(pairs: int, experts: int) -> int:
    """The fastest tiles of so many pairs of all experts."""
    return next(rows for most, rows in ROWS.items() if pairs <= most * experts)


def sizes(outputs: int, inputs: int, act: str, bias: bool, rows: int) -> dict[str, int]:
    """What wgmma_experts.cu is compiled for. act: of the gate; "": there is none."""
    return dict(
        I=inputs,
        OUTPUTS=outputs,
        M=OUTPUTS,
        KC=CHUNK,
        ROWS=rows,
        STAGES=stages(rows)[0],
        BIAS=int(bias),
        **gate_sizes(act),
    )


def stages(rows: int) -> tuple[int, int]:
    """Chunks that a block holds at once, and all bytes of its shared memory, as wgmma_experts.cu lays it out."""
    stage = (rows + OUTPUTS) * CHUNK * 2
    count = (MOST_SHARED - 2048) // stage  # 2048: to begin at a multiple of 1024, and barriers
    return count, 1024 + count * stage


def multiply(
    x: Tensor, weight: Tensor | Floats, groups: Groups, weights: Tensor, bias: Tensor | None, y: Tensor, act: str,
    rows: int,
) -> None:  # fmt: skip
    """Fill y of x [P, inputs] in the order of the groups and weight [E, outputs, inputs]. With an activation, y
    [P, outputs / 2] is the pairs' weights * act(gate) * up in that order; else y [P, outputs] is in the pairs' own, of
    an x that has the weights in it. bias [E, outputs]: added, times the pairs' weights. rows: of a tile."""
    assert isinstance(weight, Tensor), "`takes` was not asked"
    experts, outputs, inputs = weight.shape
    of = sizes(outputs, inputs, act, bias is not None, rows)
    kernel = jit.kernel("wgmma_experts", "wgmma_experts", x.dtype, shared := stages(rows)[1], **of)
    of_x = jit.tensor_map(x.data_ptr(), len(x), inputs, rows, inputs)
    of_w = jit.tensor_map(weight.data_ptr(), experts * outputs, inputs, OUTPUTS // 2, inputs)
    tiles = len(groups.tile_expert)
    blocks = min(tiles * -(-outputs // OUTPUTS), device_caps(x.device).num_sms)
    args = of_x, of_w, y if bias is None else bias, weights, *groups, y, tiles
    kernel((blocks, 1, 1), rows * 2 + 128, *args, shared=shared)
