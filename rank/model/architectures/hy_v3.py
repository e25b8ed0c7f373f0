"""Hy3 (Tencent 2026): Llama with QK norm and, behind the first layer, experts that are chosen by sigmoids, next to one
that all tokens visit."""

from __future__ import annotations

from dataclasses import dataclass, field

from ....comm.mesh import Mesh
from ....kernels.moe.router import RouterParams
from .. import base
from ..layers.moe import SharedMoE
from . import glm4_moe_lite, llama, qwen3

CONFIG = {"defaults": {"rope_theta": 11158840.0, "head_dim": 128}, "names": {"num_local_experts": "num_experts"}}


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    rms_norm_eps: float = 1e-5
    num_experts: int = 192
    num_experts_per_tok: int = 8
    num_shared_experts: int = 1
    moe_intermediate_size: int = 1536
    router_scaling_factor: float = 2.826
    mlp_layer_types: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        base.expect("mlp_bias", self.mlp_bias, False)

    def sparse(self, index: int) -> bool:
        return glm4_moe_lite.sparse(self.mlp_layer_types, index, index > 0)


class Layer(llama.Layer):
    ATTENTION = qwen3.Attention

    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        if args.sparse(index):
            inner, scale = args.moe_intermediate_size, args.router_scaling_factor
            params = RouterParams(args.num_experts_per_tok, "sigmoid", corrected=True, scale=scale)
            shared = inner * args.num_shared_experts
            self.mlp = SharedMoE(args.hidden_size, inner, shared, args.num_experts, params, mesh, args.hidden_act)


class Model(base.Model):
    LAYER = Layer
    RENAMED = {
        ".mlp.router.gate.": ".mlp.gate.",
        ".mlp.shared_mlp.": ".mlp.shared_experts.",
        ".mlp.expert_bias": ".mlp.gate.e_score_correction_bias",
        ".mlp.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
    }
