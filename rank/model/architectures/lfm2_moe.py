"""LFM2 with experts, such as LFM2-8B-A1B (Liquid AI 2025, arXiv 2511.23404): behind the first layers each token visits
some, chosen by sigmoids with a bias that is for the choice alone."""

from __future__ import annotations

from dataclasses import dataclass

from ....comm.mesh import Mesh
from ....kernels.moe.router import RouterParams
from .. import base
from ..layers.mlp import GatedMLP
from ..layers.moe import MoE
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

    @property
    def router(self) -> RouterParams:
        return RouterParams(
            self.num_experts_per_tok, "sigmoid", self.use_expert_bias, self.norm_topk_prob, self.routed_scaling_factor
        )


class Layer(lfm2.ConvLayer):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        if index < args.num_dense_layers:
            self.mlp = GatedMLP(args.hidden_size, args.intermediate_size, mesh, "silu")
        else:
            self.mlp = MoE(args.hidden_size, args.moe_intermediate_size, args.num_experts, args.router, mesh)


class Model(base.Model):
    LAYER = Layer
    RENAMED = lfm2.Model.RENAMED | {".mlp.expert_bias": ".mlp.gate.e_score_correction_bias"}
