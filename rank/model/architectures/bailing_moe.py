"""Ling and Ring, 1 and 2 (Ant Group 2025, arXiv 2503.05139, 2510.22115): Llama with experts, some of which all tokens
visit; from the second generation on with QK norm, half rotated heads and DeepSeek-V3's router."""

from __future__ import annotations

from dataclasses import dataclass

from ....kernels.moe.router import RouterParams
from .. import base
from ..layers.feed_forward import Experts, FeedForward
from . import bailing_hybrid, deepseek_v3, llama, minimax_m2

CONFIG = {"names": {"use_bias": "o_bias", "use_qk_norm": "qk_norm"}}


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    use_qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    norm_head: bool = False
    use_sliding_window: bool = False
    rotary_dim: int | None = None
    num_experts: int
    num_experts_per_tok: int
    num_shared_experts: int = 0
    moe_intermediate_size: int
    moe_shared_expert_intermediate_size: int | None = None
    first_k_dense_replace: int = 0
    score_function: str = "softmax"
    moe_router_enable_expert_bias: bool = True  # where scores are sigmoids
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0

    rope = minimax_m2.Args.rope

    def __post_init__(self) -> None:
        base.expect("score_function", self.score_function, "softmax", "sigmoid")
        base.expect("norm_head", self.norm_head, False)
        base.expect("use_sliding_window", self.use_sliding_window, False)
        if self.score_function == "sigmoid":
            base.expect("moe_router_enable_expert_bias", self.moe_router_enable_expert_bias, True)

    @property
    def qkv_bias(self) -> bool:
        return self.use_qkv_bias or self.o_bias

    @property
    def router(self) -> RouterParams:
        if self.score_function == "sigmoid":
            return deepseek_v3.router(self)
        return RouterParams(self.num_experts_per_tok, normalise=self.norm_topk_prob)

    def feed_forward(self, index: int) -> FeedForward:
        if index < self.first_k_dense_replace:
            return super().feed_forward(index)
        inner = self.moe_intermediate_size
        shared = (self.moe_shared_expert_intermediate_size or inner) * self.num_shared_experts
        return Experts(inner, self.num_experts, self.router, self.hidden_act, shared)


class Model(llama.Model):
    RENAMED = bailing_hybrid.RENAMED | {
        ".query_key_value.": ".qkv_proj.",
        ".query_layernorm.": ".q_norm.",
        ".key_layernorm.": ".k_norm.",
    }
