"""RMS norms (Zhang and Sennrich 2019, arXiv 1910.07467), plain and fused with the residual add."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ....kernels.norm import norm
from ..shard import whole
from ..weights.slicing import Field, ShardedModule
from .residual import Normed, ResidualStream


class RMSNorm(ShardedModule):
    """The RMS norm over the last axis."""

    fields = (Field("weight", "o"),)

    def __init__(self, size: int, eps: float, offset: float = 0.0):
        """offset: is added to the loaded weight; 1 for Gemma, whose checkpoints store weight - 1."""
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
    """The norm before a sublayer. It adds the pending sublayer output to the residual stream first."""

    def forward(self, stream: ResidualStream) -> Normed:  # type: ignore[override]
        """A lazy norm: the linear that reads it computes it, or fuses it."""
        return Normed(self, stream)
