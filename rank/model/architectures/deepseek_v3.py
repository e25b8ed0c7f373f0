"""DeepSeek-V3 and R1 (DeepSeek-AI 2024, arXiv 2412.19437), also Moonlight: DeepSeek-V2 with another router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....kernels.moe.router import RouterParams
from .. import base
from ..base import Count
from ..layers.feed_forward import FeedForward
from ..layers.rope import Parameters
from . import deepseek_v2, llama

CONFIG = {"names": {"qk_rope_head_dim": "head_dim"}}


@dataclass(frozen=True, kw_only=True)
class Args(deepseek_v2.Args):
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    first_k_dense_replace: int = 3
    n_group: Count = 8
    topk_group: Count = 4
    routed_scaling_factor: float = 2.5
    rope_interleave: bool = True

    def check_router(self) -> None:
        base.expect("scoring_func", self.scoring_func, "sigmoid")
        base.expect("topk_method", self.topk_method, "noaux_tc")

    @property
    def router(self) -> RouterParams:
        return router(self)

    def rope(self, index: int) -> Parameters:
        return self.rope_parameters | {"interleaved": self.rope_interleave}


def router(args: Any) -> RouterParams:
    return RouterParams(
        args.num_experts_per_tok, "sigmoid", corrected=True, normalise=args.norm_topk_prob,
        scale=args.routed_scaling_factor, groups=args.n_group, top_groups=args.topk_group,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ExpertArgs(llama.Args):
    """DeepSeek-V3's experts behind the first layers of another model."""

    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    n_group: Count = 1
    topk_group: Count = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 1
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"

    def __post_init__(self) -> None:
        super().__post_init__()
        base.expect("scoring_func", self.scoring_func, "sigmoid")
        base.expect("topk_method", self.topk_method, "noaux_tc")

    @property
    def router(self) -> RouterParams:
        return router(self)

    def sparse(self, index: int) -> bool:
        """Whether a layer has experts."""
        return index >= self.first_k_dense_replace

    def feed_forward(self, index: int) -> FeedForward:
        return deepseek_v2.feed_forward(self, index)


class Model(deepseek_v2.Model):
    pass
