"""OLMoE (Muennighoff et al. 2024, arXiv 2409.02060): Llama with QK norm over all heads, and experts in all layers."""

from __future__ import annotations

from dataclasses import dataclass

from ....kernels.moe.router import RouterParams
from .. import base
from ..layers.feed_forward import Experts
from . import llama, olmo2


@dataclass(frozen=True, kw_only=True)
class Args(olmo2.Args):
    num_experts: int = 64
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False

    def feed_forward(self, index: int) -> Experts:
        params = RouterParams(self.num_experts_per_tok, normalise=self.norm_topk_prob)
        return Experts(self.intermediate_size, self.num_experts, params, self.hidden_act)


class Layer(llama.Layer):
    ATTENTION = olmo2.Attention


class Model(base.Model):
    LAYER = Layer
