"""Grouped GEMMs of few pairs per expert on sm_90 and sm_100, where all time goes into reading weights."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .. import jit
from ..activation.activation import gate_sizes
from ..device import WHOLE_SHARED, device_caps
from .group import Groups

ROWS = 8  # pairs of an item
# Pairs per expert (H200, 2026-11-25). Of 4, Triton's tiles take 2 % less of a step of Qwen3-30B-A3B, whose experts
# have 5 million weights, but 6 % more of a layer of Mixtral-8x7B (686 against 645 us), whose have 176 million. More
# pairs of experts as large were not measured.
MOST_PAIRS = 3
MOST_PAIRS_OF_LARGE = 4
LARGE = 64 << 20  # weights of an expert: nothing between 5 and 176 million was timed
# Of a block, if all experts have pairs: of as many the first GEMM has items of 128 outputs. Of 16 tokens they take 1 %
# less of a layer of DeepSeek-V2-Lite and of Qwen3-30B-A3B than those of 64, and as much of Mixtral-8x7B (H200,
# 2026-11-25).
ITEMS = 4
MOST_STAGES = 12


class ItemConfig(NamedTuple):
    """What a block computes at once of ROWS pairs of one expert."""

    outputs: int  # of w: 64 or 128; with a gate half of them are up's


def supports(x: Tensor, w13: Tensor, w2: Tensor) -> bool:
    """Whether `expert_up` and `expert_down` take these."""
    hidden, inner = w2.shape[1:]
    sizes = hidden % 64 == 0 and inner % 64 == 0
    same = x.element_size() == 2 and x.dtype == w13.dtype == w2.dtype
    return same and sizes and jit.plain(x, w13, w2) and device_caps(x.device).has_tma


def most_pairs(w2: Tensor) -> int:
    """Per expert, of which these kernels are the fastest. w2 [E, H, I]: beside w13, which is twice as large."""
    return MOST_PAIRS_OF_LARGE if 3 * w2.shape[1] * w2.shape[2] >= LARGE else MOST_PAIRS


def item_outputs(w2: Tensor, blocks: int) -> tuple[int, int]:
    """Of an item of both GEMMs, which so many blocks share out."""
    experts, hidden, inner = w2.shape
    return 128 if experts * inner // 64 >= ITEMS * blocks else 64, 64 if hidden % 128 else 128


def expert_up(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, groups: Groups, act: str, config: ItemConfig
) -> Tensor:
    """[pairs, I] in the order of the groups: the pairs' weights * act(gate) * up, of x [T, H] and w13 [E, 2 I, H]."""
    h = x.new_empty(ids.numel(), w13.shape[1] // 2)
    _launch(x, w13, groups, weights, h, act, ids.shape[1], config)
    return h


def expert_down(h: Tensor, w2: Tensor, groups: Groups, config: ItemConfig) -> Tensor:
    """[pairs, H], in the pairs' own order, of h [pairs, I] in that of the groups, and w2 [E, H, I]."""
    y = h.new_empty(len(h), w2.shape[1])
    _launch(h, w2, groups, groups.order, y, "", 1, config)
    return y


def sizes(inputs: int, outputs: int, act: str, top: int, config: ItemConfig) -> dict[str, int]:
    """What expert_gemm.cu is compiled for. act: of the gate; "": there is none."""
    return dict(
        I=inputs,
        OUTPUTS=outputs,
        M=config.outputs,
        KC=_chunk(inputs),
        STAGES=stages(config, inputs)[0],
        TILES=ROWS // 8,
        **gate_sizes(act),
        TOP=top,
    )


def _chunk(inputs: int) -> int:
    """Inputs that a block multiplies at once."""
    return 64 if inputs % 128 else 128


def stages(config: ItemConfig, inputs: int) -> tuple[int, int]:
    """Chunks that a block holds at once, and all bytes of its shared memory, as expert_gemm.cu lays it out."""
    sums = _warps_together(config) * config.outputs * (ROWS + 1) * 4
    stage = (config.outputs + ROWS) * _chunk(inputs) * 2
    count = min((WHOLE_SHARED - 1024 - sums) // stage, MOST_STAGES)
    return count, 1024 + count * stage + sums


def _warps_together(config: ItemConfig) -> int:
    """Warps that share a subtile of 16 outputs."""
    return 1 if config.outputs > 64 else 2 if config.outputs > 32 else 4


def _launch(
    x: Tensor, weight: Tensor, groups: Groups, scales: Tensor, y: Tensor, act: str, top: int, config: ItemConfig
) -> None:
    """scales: the pairs' weights, of a gated GEMM."""
    experts, outputs, inputs = weight.shape
    shared = stages(config, inputs)[1]
    kernel = jit.kernel("expert_gemm", "expert_gemm", x.dtype, shared, **sizes(inputs, outputs, act, top, config))
    of_w = jit.tensor_map(
        weight.data_ptr(), experts * outputs, inputs, config.outputs // 2 if act else config.outputs, inputs
    )
    tiles = len(groups.tile_expert)
    blocks = min(device_caps(x.device).num_sms, tiles * (outputs // config.outputs))
    threads = 64 + 2 * config.outputs * _warps_together(config)
    kernel((blocks, 1, 1), threads, x, of_w, *groups, scales, y, tiles, shared=shared)
