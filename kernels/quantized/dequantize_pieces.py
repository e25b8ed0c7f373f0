"""Weights in pieces become plain ones of 16 bits, for the kernels that multiply those."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import jit

if TYPE_CHECKING:
    from .pieces_cuda import Layout, Packed

RUN = 4  # pieces that a warp takes


def dequantize(packed: Packed, dtype: torch.dtype) -> Tensor:
    """The weight [O, I] in a dtype of 16 bits, each element rounded once."""
    out = torch.empty(packed.outputs, packed.inputs, dtype=dtype, device=packed.pieces.device)
    kernel = jit.kernel("dequantize_pieces", "dequantize", dtype, 0, **sizes(packed.inputs, packed.layout))
    strips, groups, _ = packed.pieces.shape
    warps = min(8, -(-groups // RUN))
    kernel((-(-groups // (RUN * warps)), strips, 1), warps * 32, packed.pieces, out, packed.outputs)
    return out


def sizes(inputs: int, layout: Layout) -> dict[str, jit.Size]:
    """What dequantize_pieces.cu is compiled for."""
    return dict(I=inputs, RUN=RUN, **layout.constants)
