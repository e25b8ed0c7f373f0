"""Quantised experts on GPUs, over pairs that are sorted by expert: which of their kernels multiplies."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import jit
from ..device import DeviceCaps
from ..quantized import e4m3_wgmma, pieces_cuda
from ..quantized.pieces_cuda import STRIP
from ..quantized.stack import Stack
from . import dequantized, e4m3_experts, quantized_experts, quantized_pipeline, quantized_wgmma_experts
from .group import Groups
from .quantized_experts import ExpertTileConfig
from .quantized_pipeline import PipelineConfig
from .quantized_wgmma_experts import WgmmaExpertsConfig

# Of quantized_pipeline.cu, whose warps have a unit of 32 outputs each: of few units most are idle. One token of
# Qwen3-30B-A3B has 2.9, and is faster; more than 4 pairs per expert, and fewer units, were not timed.
PIPELINE_PAIRS = 8  # most per expert
PIPELINE_UNITS = 2  # least of a multiprocessor


def supports(x: Tensor, w13: object, w2: object) -> bool:
    """Whether `expert_up` and `expert_down` take these."""
    if not isinstance(w13, Stack) or not isinstance(w2, Stack) or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    pieces = isinstance(w13.packed, pieces_cuda.Packed) and isinstance(w2.packed, pieces_cuda.Packed)
    return pieces and w2.shape[2] % STRIP == 0 and jit.plain(x, *w13.tensors, *w2.tensors)


KernelConfig = ExpertTileConfig | PipelineConfig | WgmmaExpertsConfig | e4m3_wgmma.E4m3Config


class KernelConfigs(NamedTuple):
    """How both GEMMs are computed; their tiles have the same rows."""

    up: KernelConfig
    down: KernelConfig

    @property
    def rows(self) -> int:
        return self.up.rows


def multiplies_codes(pairs: int, experts: int, w13: object, w2: object, found: DeviceCaps) -> bool:
    """Whether `choose_kernels` is faster than GEMMs of weights that are dequantised first."""
    return pairs <= dequantized.LEAST_PAIRS * experts or e4m3_experts.takes(w13, w2, found)


def choose_kernels(pairs: int, experts: int, w13: Stack, w2: Stack, found: DeviceCaps) -> KernelConfigs:
    """Of so many pairs of all experts."""
    if pairs > e4m3_experts.MOST_OF_16_BITS * experts and e4m3_experts.takes(w13, w2, found):
        return KernelConfigs(*e4m3_experts.choose(pairs, experts))
    if pairs > quantized_wgmma_experts.LEAST_PAIRS * experts and quantized_wgmma_experts.takes(w13, w2, found):
        return KernelConfigs(*quantized_wgmma_experts.choose(pairs, experts, w13, w2, found.num_sms))
    units = min(pairs, experts) * w13.shape[1] // (2 * STRIP)
    if found.has_tma and pairs <= PIPELINE_PAIRS * experts and units >= PIPELINE_UNITS * found.num_sms:
        up, down = (choose_pipeline(one) for one in (w13, w2))
        if up or down:
            return KernelConfigs(up or tiled_config(1, w13, True), down or tiled_config(1, w2, False))
    return tiled_configs(quantized_experts.choose_tiles(pairs, experts), w13, w2)


def tiled_configs(tiles: int, w13: Stack, w2: Stack) -> KernelConfigs:
    """Both by quantized_experts.cu."""
    return KernelConfigs(tiled_config(tiles, w13, True), tiled_config(tiles, w2, False))


def tiled_config(tiles: int, stack: Stack, gated: bool) -> ExpertTileConfig:
    return quantized_experts.choose(tiles, stack.shape[2], stack.packed.layout, gated)


def choose_pipeline(stack: Stack) -> PipelineConfig | None:
    """None: its format is slower there, or x does not fit."""
    inputs, layout = stack.shape[2], stack.packed.layout
    counts = quantized_pipeline.WARPS, *quantized_pipeline.FEWER
    return next((found for n in counts if (found := quantized_pipeline.choose(inputs, layout, n))), None)


def expert_up(
    x: Tensor, weights: Tensor, w13: Stack, groups: Groups, top: int, act: str, config: KernelConfig,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[pairs, I] in the order of the groups: the pairs' weights * act(gate) * up, of x [T, H]; config: of the
    groups' rows."""
    pairs = len(groups.order)
    h = x.new_empty(max(pairs, config.rows), w13.shape[1] // 2)[:pairs]  # in memory that has a tile's rows at least
    _launch(x, w13, groups, weights, h, act, top, config, bias)
    return h


def expert_down(
    h: Tensor, weights: Tensor, w2: Stack, groups: Groups, config: KernelConfig, bias: Tensor | None = None
) -> Tensor:
    """[pairs, H], in the pairs' own order, of h [pairs, I] in that of the groups. weights: of the bias."""
    y = h.new_empty(len(h), w2.shape[1])
    _launch(h, w2, groups, weights, y, "", 1, config, bias)
    return y


def _launch(
    x: Tensor, stack: Stack, groups: Groups, weights: Tensor, y: Tensor, act: str, top: int,
    config: KernelConfig, bias: Tensor | None,
) -> None:  # fmt: skip
    if isinstance(config, PipelineConfig):
        return quantized_pipeline.launch(x, stack, groups, weights, y, act, top, config, bias)
    if isinstance(config, e4m3_wgmma.E4m3Config):
        return e4m3_experts.launch(x, stack, groups, weights, y, act, top, config, bias)
    if isinstance(config, WgmmaExpertsConfig):
        return quantized_wgmma_experts.launch(x, stack, groups, weights, y, act, top, config, bias)
    return quantized_experts.launch(x, stack, groups, weights, y, act, top, config, bias)
