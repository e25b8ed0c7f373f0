"""Q8_0 on CPUs: q8_0_cpu.cpp. Few rows are multiplied with the codes as they lie; the weight is never in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cpp import ops

MOST_ROWS = 64
GROUP = 32  # weights with one scale
BLOCK = 8  # outputs, as in q8_0_cpu.cpp


def takes(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether operations read x [O, I], weights or codes, and compute with this dtype."""
    here = x.device.type == "cpu" and x.is_contiguous() and x.numel() > 0
    return here and dtype in ops.SUFFIXES and ops.available()


def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [O, I] and scales [O, I / 32], where it takes the weight."""
    codes = weight.new_empty(weight.shape, dtype=torch.int8)
    scales = weight.new_empty(len(weight), weight.shape[1] // GROUP, dtype=torch.float32)
    ops.typed("q8_0_cpu", "q8_0_encode", weight.dtype)(weight, codes, scales, scales.numel())
    return codes, scales.to(torch.float16)


def supports(x: Tensor, codes: Tensor) -> bool:
    """x [T, I], codes [O, I]."""
    return 0 < len(x) <= MOST_ROWS and x.stride(1) == 1 and takes(codes, x.dtype)


def linear(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """[T, O], where it supports; sums are f32."""
    outputs, inputs = codes.shape
    y = x.new_empty(len(x), outputs)
    # Of each thread: a block's scales, and its weights where rows are many.
    scratch = x.new_empty(torch.get_num_threads(), BLOCK * (inputs + inputs // GROUP), dtype=torch.float32)
    ops.typed("q8_0_cpu", "q8_0_linear", x.dtype)(
        x, codes, scales, bias, y, scratch, len(x), inputs, outputs, x.stride(0)
    )
    return y


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight [O, I], where it takes the dtype."""
    y = codes.new_empty(codes.shape, dtype=dtype)
    ops.typed("q8_0_cpu", "q8_0_dequantize", dtype)(codes, scales, y, scales.numel())
    return y
