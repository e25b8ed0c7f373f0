"""Mistral Small 4 (Mistral AI 2026): DeepSeek-V3's latent attention with Ministral 3's attention temperature, and
experts chosen by a softmax, one of which all tokens visit."""

from __future__ import annotations

from dataclasses import dataclass

from ....kernels.moe.router import RouterParams
from ..layers.rope import Parameters
from . import deepseek_v2

CONFIG = {
    "names": {"qk_rope_head_dim": "head_dim"},
    "defaults": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
        }
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Args(deepseek_v2.Args):
    kv_lora_rank: int = 256
    q_lora_rank: int | None = 1024
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    n_routed_experts: int = 128
    n_shared_experts: int = 1
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 2048
    norm_topk_prob: bool = True
    rope_interleave: bool = True

    def check_router(self) -> None:
        """All of its keys are supported."""

    @property
    def router(self) -> RouterParams:
        """Groups are as good as their best two experts together."""
        return RouterParams(
            self.num_experts_per_tok, normalise=self.norm_topk_prob, scale=self.routed_scaling_factor,
            groups=self.n_group, top_groups=self.topk_group,
        )  # fmt: skip

    def rope(self, index: int) -> Parameters:
        """A factor in config.json says which part of a head is rotated: what stands for the head here is that part."""
        found = self.rope_parameters | {"interleaved": self.rope_interleave, "partial_rotary_factor": 1.0}
        found.pop("max_position_embeddings", None)  # which says nothing
        return found


Model = deepseek_v2.Model
