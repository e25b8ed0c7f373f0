"""GEMMs of a few rows on GPUs, where all time goes into reading the weights."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor

from .. import jit
from ..device import DeviceCaps, device_caps
from . import gemv, pipelined_gemm
from .pipelined_gemm import HEIGHTS, MOST_ROWS, SPLITS, TileConfig, whole_tiles

GEMV_ROWS = 2  # more are faster on tensor cores
# Inputs from which on sharing gains more than exchanging the sums costs. On an H200 (2026-11-23), 64 rows: 3584 x 18944
# by four blocks takes 36.0 us instead of 39.1, 4096 x 14336 by two 30.4 instead of 31.2, and 3584 x 3584 by two 9.6
# instead of 9.2.
SPLIT_FROM = 12288
UNEVEN_GAIN = 0.9  # of the time of tiles that divide the outputs


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
        return pipelined_gemm.pipelined_gemm(x, weight, config, gate, bias)
    return gemv.gemv(x, weight, gate, bias)


def supports_norm(x: Tensor, residual: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether `normed_linear` takes these and is faster than a norm before."""
    if x.numel() > gemv.NORMED or not supports(x, weight, bias) or _config(x, weight) != "gemv":
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
    return gemv.gemv(x, weight, gate, bias, norm=(residual, norm_weight, eps, total)), total


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
                "pipelined_gemm", weight.dtype, **pipelined_gemm.sizes(n, outputs, inputs, config, gate, bias, whole)
            )
        elif config:
            how = *gemv.choose(n, outputs, found, gate), gate, bias, norm and n * inputs <= gemv.NORMED
            yield jit.variant("gemv", weight.dtype, **gemv.sizes(n, inputs, *how))


def _config(x: Tensor, weight: Tensor) -> TileConfig | Literal["gemv"] | None:
    outputs, inputs = weight.shape
    return _choose(x.shape[0], outputs, inputs, device_caps(x.device))


def _choose(rows: int, outputs: int, inputs: int, found: DeviceCaps) -> TileConfig | Literal["gemv"] | None:
    return choose(rows, outputs, inputs, found.num_sms, found.has_tma, whole_tiles(rows, found))


@functools.cache
def choose(
    rows: int, outputs: int, inputs: int, num_sms: int, staging: bool, whole: bool = False
) -> TileConfig | Literal["gemv"] | None:
    """The fastest config for these sizes; None: the library's. whole: tiles take all 64 rows."""
    if rows <= GEMV_ROWS and inputs % 512 == 0 and outputs % 64 == 0 and rows * inputs * 2 <= gemv.SHARED:
        return "gemv"
    if not staging:
        return None
    # One tile for each multiprocessor, or some in turn, up to 128 high: as many as the busiest one has, each as long as
    # its outputs take to be read, and x as a quarter as many (measured on an H200 on 2026-11-23, 37888 outputs: of 16
    # rows 8 layers take 999 us at 32, 1012 at 64 and 1050 at 128, of 64 rows 1156, 1144 and 1177).
    padded = 8 * pipelined_gemm.row_tiles(rows, False)

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
        if height and length and pipelined_gemm.splits(height * split, outputs, inputs, num_sms, split):
            return TileConfig(height * split, length, split)
    return None


def _length(height: int, inputs: int) -> int:
    """The longest chunk for a tile of this height; 0: none divides the inputs."""
    lengths = (256, 128, 64) if height <= 64 else (128, 64) if height <= 128 else (64,)
    return next((length for length in lengths if inputs % length == 0), 0)
