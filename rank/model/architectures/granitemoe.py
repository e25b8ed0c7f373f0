"""Granite 3 with experts (IBM 2024): Granite with experts in place of the feed-forward layers."""

from __future__ import annotations

from dataclasses import dataclass

from ....comm.mesh import Mesh
from ....kernels.moe.router import RouterParams
from .. import base
from ..layers.moe import MoE
from . import granite


@dataclass(frozen=True, kw_only=True)
class Args(granite.Args):
    num_local_experts: int = 8
    num_experts_per_tok: int = 2


class Layer(granite.Layer):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        params = RouterParams(args.num_experts_per_tok)
        self.mlp = MoE(args.hidden_size, args.intermediate_size, args.num_local_experts, params, mesh, args.hidden_act)


class Model(base.Model):
    LAYER = Layer
    RENAMED = {
        ".block_sparse_moe.router.layer.": ".mlp.gate.",
        ".block_sparse_moe.router.": ".mlp.gate.",
        ".block_sparse_moe.input_linear.weight": ".mlp.experts.gate_up_proj",
        ".block_sparse_moe.output_linear.weight": ".mlp.experts.down_proj",
        ".block_sparse_moe.": ".mlp.",
    }
