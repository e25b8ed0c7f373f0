"""xIELU (Huang and Schlag 2024, arXiv 2411.13010): a quadratic right of zero, an integrated ELU left of it."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import jit
from ..cpp import ops
from .activation import THREADS

BETA = 0.5  # the slope at zero


def xielu(x: Tensor, positive: float, negative: float) -> Tensor:
    """positive x^2 + BETA x where x > 0, else negative (e^x - 1 - x) + BETA x; in f32. x may be overwritten."""
    if x.is_cuda:
        return xielu_cuda(x, positive, negative)
    if x.is_contiguous() and ops.takes(x):
        ops.typed("xielu", "xielu", x.dtype)(x, x.numel(), positive, negative, BETA)
        return x
    return xielu_reference(x, positive, negative)


def xielu_reference(x: Tensor, positive: float, negative: float) -> Tensor:
    wide = x.float()
    curve = torch.where(wide > 0, positive * wide.square(), negative * (wide.clamp(max=0).expm1() - wide))
    return curve.add_(wide, alpha=BETA).to(x.dtype)


def xielu_cuda(x: Tensor, positive: float, negative: float) -> Tensor:
    x = x.contiguous()
    vector = jit.vector(x, x.numel())
    count = x.numel() // vector
    kernel = jit.kernel("xielu", "xielu", x.dtype, V=vector)
    kernel((-(-count // THREADS), 1, 1), THREADS, x, count, positive, negative, BETA)
    return x
