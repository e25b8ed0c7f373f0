"""Experts next to a layer's MLP (Gemma 4 2026): the router reads the residual stream through a norm of its own, and a
factor of each expert scales its weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ....comm.mesh import Mesh
from ....kernels.moe.router import RouterParams
from ..experts.fused import FusedExperts
from ..shard import whole
from ..weights.slicing import Field, ShardedModule, parameter
from .mlp import activation
from .moe import Router
from .norm import RMSNorm


class PerExpertScale(ShardedModule):
    """A factor on the weights of each expert."""

    fields = (Field("per_expert_scale", "o", torch.float32),)

    def __init__(self, experts: int):
        super().__init__()
        self.outputs = (whole(experts),)
        self.per_expert_scale = parameter(experts)


class ScaledNorm(RMSNorm):
    """A norm that also divides by the square root of the size."""

    def finish(self) -> None:
        self.weight.data *= self.weight.shape[0] ** -0.5


class NormedMoE(nn.Module):
    """The router with its norm, and the experts with a norm before and one after them."""

    def __init__(self, hidden: int, inner: int, experts: int, top_k: int, act: str, eps: float, mesh: Mesh):
        super().__init__()
        self.norm = ScaledNorm(hidden, eps)
        self.proj = Router(hidden, experts, RouterParams(top_k))
        self.scale = PerExpertScale(experts)
        self.experts = FusedExperts(hidden, inner, experts, top_k, mesh, activation(act))
        self.before = RMSNorm(hidden, eps)
        self.after = RMSNorm(hidden, eps)

    def forward(self, residual: Tensor) -> Tensor:
        """residual [T, H], which is not changed → [T, H], equal on all ranks."""
        ids, weights = self.proj(self.norm(residual))
        weights = weights * self.scale.per_expert_scale[ids.long()]
        return self.after(self.experts(self.before(residual), ids, weights).sum())
