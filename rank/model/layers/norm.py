from __future__ import annotations

import torch
from torch import Tensor, nn

from ....kernels import norm
from ..weights.slicing import Field, Sliced
from .shard import whole


class RMSNorm(Sliced):
    """Over the last axis, with the residual stream's addition fused where there is one."""

    fields = (Field("weight", "o"),)

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.outputs = (whole(size),)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, device="meta"), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return norm.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The norm of x + residual [T, H], and that sum: the residual stream from here on. Both may be overwritten.

        Without a residual, x is the stream.
        """
        if residual is None:
            return norm.rms_norm(x, self.weight, self.eps), x
        return norm.add_rms_norm(x, residual, self.weight, self.eps)
