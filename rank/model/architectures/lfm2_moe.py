"""LFM2 with experts, such as LFM2-8B-A1B (Liquid AI 2025, arXiv 2511.23404): behind the first layers each token visits
some, chosen by sigmoids with a bias that is for the choice alone."""

from __future__ import annotations

from dataclasses import dataclass

from ....kernels.moe.router import RouterParams
from ..layers.feed_forward import Experts, FeedForward
from . import lfm2

CONFIG = {
    "names": {"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"},
    "defaults": {"rope_theta": 1000000.0},
}


@dataclass(frozen=True, kw_only=True)
class Args(lfm2.ConvArgs):
    moe_intermediate_size: int = 1792
    num_experts: int = 32
    num_experts_per_tok: int = 4
    num_dense_layers: int = 2
    use_expert_bias: bool = True
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0

    def feed_forward(self, index: int) -> FeedForward:
        if index < self.num_dense_layers:
            return super().feed_forward(index)
        params = RouterParams(
            self.num_experts_per_tok, "sigmoid", self.use_expert_bias, self.norm_topk_prob, self.routed_scaling_factor
        )
        return Experts(self.moe_intermediate_size, self.num_experts, params, self.hidden_act)


class Model(lfm2.Model):
    RENAMED = lfm2.Model.RENAMED | {".mlp.expert_bias": ".mlp.gate.e_score_correction_bias"}
