"""DeepSeek-V3 and R1 (DeepSeek-AI 2024, arXiv 2412.19437), also Moonlight: DeepSeek-V2 with another router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....kernels.moe.router import RouterParams
from .. import base
from ..base import Count
from ..layers.rope import Parameters
from . import deepseek_v2

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


class Model(deepseek_v2.Model):
    pass
