from __future__ import annotations

import torch
from torch import Tensor, nn

from ....kernels.norm import norm
from ..weights.slicing import Field, ShardedModule
from .residual import Normed, ResidualStream
from .shard import whole


class RMSNorm(ShardedModule):
    """Over the last axis."""

    fields = (Field("weight", "o"),)

    def __init__(self, size: int, eps: float, offset: float = 0.0):
        """offset: what checkpoints have left out of the weight, as 1 in Gemma's."""
        super().__init__()
        self.outputs = (whole(size),)
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.empty(size, device="meta"), requires_grad=False)

    def finish(self) -> None:
        if self.offset:
            self.weight.data += self.offset

    def forward(self, x: Tensor) -> Tensor:
        return norm.rms_norm(x, self.weight, self.eps)


class AddRMSNorm(RMSNorm):
    """The norm before a sublayer: of the residual stream and what is still to be added to it."""

    def forward(self, stream: ResidualStream) -> Normed:  # type: ignore[override]
        """Nothing is computed before the linear behind it reads it."""
        return Normed(self, stream)
