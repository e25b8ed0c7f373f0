"""OLMoE (Muennighoff et al. 2024, arXiv 2409.02060): Llama with QK norm over all heads, and experts in all layers."""

from __future__ import annotations

from dataclasses import dataclass

from ....comm.mesh import Mesh
from ....kernels.moe.router import RouterParams
from .. import base
from ..layers.moe import MoE
from . import llama, olmo2


@dataclass(frozen=True, kw_only=True)
class Args(olmo2.Args):
    num_experts: int = 64
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False


class Layer(llama.Layer):
    ATTENTION = olmo2.Attention

    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        params = RouterParams(args.num_experts_per_tok, normalise=args.norm_topk_prob)
        self.mlp = MoE(args.hidden_size, args.intermediate_size, args.num_experts, params, mesh, args.hidden_act)


class Model(base.Model):
    LAYER = Layer
