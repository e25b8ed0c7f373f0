"""GLM-4.7-Flash (Zhipu AI 2026): DeepSeek-V3's latent attention with GLM-4.5's experts."""

from __future__ import annotations

from dataclasses import dataclass, field

from .. import base
from ..base import Count
from . import deepseek_v3

CONFIG = {"names": {"qk_rope_head_dim": "head_dim"}}
DENSE, SPARSE = "dense", "sparse"


@dataclass(frozen=True, kw_only=True)
class Args(deepseek_v3.Args):
    rms_norm_eps: float = 1e-5
    q_lora_rank: int | None = 768
    n_shared_experts: int = 1
    n_group: Count = 1
    topk_group: Count = 1
    routed_scaling_factor: float = 1.8
    first_k_dense_replace: int = 1
    mlp_layer_types: list[str] = field(default_factory=list)

    def sparse(self, index: int) -> bool:
        return sparse(self.mlp_layer_types, index, super().sparse(index))


def sparse(types: list[str], index: int, usual: bool) -> bool:
    """Whether a layer has experts, by mlp_layer_types, or `usual` where that has no entry for it."""
    if index >= len(types):
        return usual
    base.expect("mlp_layer_types", types[index], DENSE, SPARSE)
    return types[index] == SPARSE


Model = deepseek_v3.Model
