"""Mixtral (Jiang et al. 2024, arXiv 2401.04088): Llama with experts in place of the feed-forward layers."""

from __future__ import annotations

from dataclasses import dataclass

from ....kernels.moe.router import RouterParams
from ..base import Count
from ..layers.feed_forward import Experts
from . import llama, mistral

CONFIG = {"defaults": {"rope_theta": 1000000.0}}


@dataclass(frozen=True, kw_only=True)
class Args(mistral.Args):
    num_local_experts: int
    num_experts_per_tok: int
    sliding_window: Count | None = None
    rms_norm_eps: float = 1e-5

    def feed_forward(self, index: int) -> Experts:
        params = RouterParams(self.num_experts_per_tok)
        return Experts(self.intermediate_size, self.num_local_experts, params, self.hidden_act)


class Model(llama.Model):
    RENAMED = {".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}
