"""MiniMax-M2 (MiniMax 2025): experts in all layers, QK norm over all heads, partly rotated heads."""

from __future__ import annotations

from dataclasses import dataclass, field

from ....kernels.moe.router import RouterParams
from .. import base
from ..layers.feed_forward import Experts
from ..layers.rope import Parameters
from . import llama, mixtral, olmo2

CONFIG = {"defaults": {"rope_theta": 5000000.0, "head_dim": 128}}


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    num_local_experts: int
    num_experts_per_tok: int
    rotary_dim: int | None = None  # an older way to say which part of a head is rotated
    scoring_func: str = "sigmoid"
    use_routing_bias: bool = True
    shared_intermediate_size: int = 0
    use_qk_norm: bool = True
    qk_norm_type: str = "per_layer"
    attn_type_list: list[int] = field(default_factory=list)  # of each layer: 0 where its attention is linear

    def __post_init__(self) -> None:
        base.expect("scoring_func", self.scoring_func, "sigmoid")
        base.expect("use_routing_bias", self.use_routing_bias, True)
        base.expect("shared_intermediate_size", self.shared_intermediate_size, 0)
        base.expect("use_qk_norm", self.use_qk_norm, True)
        base.expect("qk_norm_type", self.qk_norm_type, "per_layer")
        for kind in self.attn_type_list:
            base.expect("attn_type_list with", kind, 1)

    def rope(self, index: int) -> Parameters:
        part = {"partial_rotary_factor": self.rotary_dim / self.head_dim} if self.rotary_dim else {}
        return part | self.rope_parameters

    def feed_forward(self, index: int) -> Experts:
        params = RouterParams(self.num_experts_per_tok, "sigmoid", corrected=True)
        return Experts(self.intermediate_size, self.num_local_experts, params, self.hidden_act)


class Layer(llama.Layer):
    ATTENTION = olmo2.Attention


class Model(base.Model):
    LAYER = Layer
    RENAMED = mixtral.Model.RENAMED | {".mlp.e_score_correction_bias": ".mlp.gate.e_score_correction_bias"}
