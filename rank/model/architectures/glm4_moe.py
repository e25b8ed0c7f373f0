"""GLM-4.5 and GLM-4.6, also Air (Zeng et al. 2025, arXiv 2508.06471): Llama with partly rotated heads and, behind the
first layers, experts chosen as in DeepSeek-V3 (arXiv 2412.19437)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ....comm.mesh import Mesh
from ....kernels.moe.router import RouterParams
from .. import base
from ..base import Count
from ..layers.moe import SharedMoE
from . import deepseek_v3, llama, qwen3


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    o_bias: ClassVar[bool] = False

    rms_norm_eps: float = 1e-5
    n_routed_experts: int = 0
    num_local_experts: int = 0  # the same by another name
    n_shared_experts: int = 1
    num_experts_per_tok: int
    moe_intermediate_size: int
    n_group: Count = 1
    topk_group: Count = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 1
    use_qk_norm: bool = False
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"

    def __post_init__(self) -> None:
        base.expect("scoring_func", self.scoring_func, "sigmoid")
        base.expect("topk_method", self.topk_method, "noaux_tc")

    @property
    def router(self) -> RouterParams:
        return deepseek_v3.router(self)


class Layer(llama.Layer):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        if args.use_qk_norm:
            self.self_attn = qwen3.Attention(args, mesh, index, local)
        if index >= args.first_k_dense_replace:
            inner, experts = args.moe_intermediate_size, args.n_routed_experts or args.num_local_experts
            shared = inner * args.n_shared_experts
            self.mlp = SharedMoE(args.hidden_size, inner, shared, experts, args.router, mesh, args.hidden_act)


class Model(base.Model):
    LAYER = Layer
