"""Mixture of experts in place of a feed-forward layer (Shazeer et al. 2017, arXiv 1701.06538)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ....comm.mesh import Mesh
from ....errors import MODEL, FatalError
from ....kernels.moe.expert_mlp import SharedExperts
from ....kernels.moe.router import RouterParams, route
from ..experts.fused import APART, ExpertLayout, FusedExperts
from ..shard import whole
from ..weights.slicing import Field, ShardedModule
from .mlp import GatedMLP, activation
from .residual import Normed, Partial


class Router(ShardedModule):
    """Chooses each token's experts, in f32 and on every rank alike."""

    fields = (
        Field("weight", "oi"),
        Field("e_score_correction_bias", "o", torch.float32),
        Field("bias", "o", torch.float32),
    )

    def __init__(self, hidden: int, experts: int, params: RouterParams):
        super().__init__()
        _check_groups(experts, params)
        self.inputs, self.outputs, self.params = whole(hidden), (whole(experts),), params
        self.weight = nn.Parameter(torch.empty(experts, hidden, device="meta"), requires_grad=False)
        bias = nn.Parameter(torch.empty(experts, device="meta"), requires_grad=False)
        self.e_score_correction_bias = bias if params.corrected else None
        self.bias = bias if params.biased else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] → ids [T, k] int32 and weights [T, k] f32."""
        bias = self.bias if self.params.biased else self.e_score_correction_bias
        return route(x, self.weight, bias, self.params)


def _check_groups(experts: int, params: RouterParams) -> None:
    if experts % params.groups:
        raise FatalError(f"config.json: {experts} experts do not fall into {params.groups} groups", MODEL)
    size = experts // params.groups
    if params.groups > 1 and size < params.group_top:
        raise FatalError(
            f"config.json: {experts} experts in {params.groups} groups are {size} in each, but groups are chosen by "
            f"their best {params.group_top}",
            MODEL,
        )
    if params.top_groups > params.groups or params.top_groups * size < params.top_k:
        raise FatalError(
            f"config.json: a token cannot visit {params.top_k} experts of its best {params.top_groups} of "
            f"{params.groups} groups of {size}",
            MODEL,
        )


class MoE(nn.Module):
    """The weighted sum of k experts of each token. A subclass may add an expert that all tokens visit."""

    def __init__(
        self,
        hidden: int,
        inner: int,
        experts: int,
        params: RouterParams,
        mesh: Mesh,
        act: str = "silu",
        layout: ExpertLayout = APART,
        gated: bool = True,
    ):
        """inner: of one expert. act: the activation's name in config.json. layout: of the experts' tensors. gated:
        whether experts have a gate. Raises FatalError where a token is to visit more experts than there are, or than
        its groups have."""
        super().__init__()
        if not 0 < params.top_k <= experts:
            raise FatalError(
                f"config.json: num_experts_per_tok is {params.top_k}, but there are {experts} experts", MODEL
            )
        self.gate = Router(hidden, experts, params)
        self.experts = FusedExperts(hidden, inner, experts, params.top_k, mesh, activation(act), layout, gated)

    def forward(self, h: Normed | Tensor) -> Partial:
        """h [T, H] → this rank's part of [T, H]."""
        x = h.tensor() if isinstance(h, Normed) else h
        return self.experts(x, *self.gate(x))


class SharedMoE(MoE):
    """With experts that all tokens visit, held as one (DeepSeekMoE: Dai et al. 2024, arXiv 2401.06066)."""

    def __init__(
        self, hidden: int, inner: int, shared: int, experts: int, params: RouterParams, mesh: Mesh, act: str = "silu"
    ):
        """shared: inner size of these together."""
        super().__init__(hidden, inner, experts, params, mesh, act)
        self.shared_experts = GatedMLP(hidden, shared, mesh, act)

    def forward(self, h: Normed | Tensor) -> Partial:
        x = h.tensor() if isinstance(h, Normed) else h
        shared = self._plain_shared()
        if shared is not None and self.experts.takes_shared(x, shared):
            return self.experts(x, *self.gate(x), shared)
        return super().forward(x) + self.shared_experts(x)

    def _plain_shared(self) -> SharedExperts | None:
        """For the routed experts' launch, which adds no biases: where they have none, and plain matrices."""
        linears = self.shared_experts.gate_up_proj, self.shared_experts.down_proj
        up, down = (None if one.biased else one.matrix for one in linears)
        return None if up is None or down is None else SharedExperts(up, down)
