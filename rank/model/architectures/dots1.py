"""dots.llm1 (rednote 2025, arXiv 2506.05767): Qwen3's attention with DeepSeek-V3's experts."""

from __future__ import annotations

from dataclasses import dataclass

from ....comm.mesh import Mesh
from ....kernels.moe.router import RouterParams
from .. import base
from ..base import Count
from ..layers.moe import SharedMoE
from . import deepseek_v3, qwen3


@dataclass(frozen=True, kw_only=True)
class Args(qwen3.Args):
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: Count = 1
    topk_group: Count = 1
    norm_topk_prob: bool = False
    first_k_dense_replace: int = 0
    routed_scaling_factor: float = 1.0
    use_sliding_window: bool = True
    sliding_window: Count | None = 4096
    max_window_layers: int = 62
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"

    def __post_init__(self) -> None:
        super().__post_init__()
        base.expect("scoring_func", self.scoring_func, "sigmoid")
        base.expect("topk_method", self.topk_method, "noaux_tc")

    @property
    def router(self) -> RouterParams:
        return deepseek_v3.router(self)


class Layer(qwen3.Layer):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        if index >= args.first_k_dense_replace:
            inner = args.moe_intermediate_size
            shared, experts = inner * args.n_shared_experts, args.n_routed_experts
            self.mlp = SharedMoE(args.hidden_size, inner, shared, experts, args.router, mesh, args.hidden_act)


class Model(base.Model):
    LAYER = Layer
