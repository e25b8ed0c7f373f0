"""Hy3 (Tencent 2026): Llama with QK norm and, behind the first layer, experts that are chosen by sigmoids, next to one
that all tokens visit."""

from __future__ import annotations

from dataclasses import dataclass, field

from ....kernels.moe.router import RouterParams
from .. import base
from ..layers.feed_forward import Experts, FeedForward
from . import glm4_moe_lite, llama

CONFIG = {
    "defaults": {"rope_theta": 11158840.0, "head_dim": 128},
    "names": {"num_local_experts": "num_experts", "expert_hidden_dim": "moe_intermediate_size"},
}


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    rms_norm_eps: float = 1e-5
    num_experts: int = 192
    num_experts_per_tok: int = 8
    num_shared_experts: int = 1
    moe_intermediate_size: int = 1536
    router_scaling_factor: float = 2.826
    mlp_layer_types: list[str] = field(default_factory=list)
    first_k_dense_replace: int = 1
    # Keys of the published code, which transformers takes for granted.
    qk_norm: bool = True
    route_norm: bool = True
    moe_router_use_sigmoid: bool = True

    def __post_init__(self) -> None:
        base.expect("mlp_bias", self.mlp_bias, False)
        for key in ("qk_norm", "route_norm", "moe_router_use_sigmoid"):
            base.expect(key, getattr(self, key), True)

    def feed_forward(self, index: int) -> FeedForward:
        if not glm4_moe_lite.sparse(self.mlp_layer_types, index, index >= self.first_k_dense_replace):
            return super().feed_forward(index)
        inner, scale = self.moe_intermediate_size, self.router_scaling_factor
        params = RouterParams(self.num_experts_per_tok, "sigmoid", corrected=True, scale=scale)
        return Experts(inner, self.num_experts, params, self.hidden_act, inner * self.num_shared_experts)


class Model(llama.Model):
    RENAMED = {
        ".mlp.router.gate.": ".mlp.gate.",
        ".mlp.shared_mlp.": ".mlp.shared_experts.",
        ".mlp.expert_bias": ".mlp.gate.e_score_correction_bias",
        ".mlp.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
    }
