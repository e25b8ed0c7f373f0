"""Mixtral (Jiang et al. 2024, arXiv 2401.04088): Llama with experts in place of the feed-forward layers."""

from __future__ import annotations

from dataclasses import dataclass

from ....comm.mesh import Mesh
from ....kernels.moe.router import RouterParams
from .. import base
from ..base import Count
from ..layers.moe import MoE
from . import llama, mistral

CONFIG = {"defaults": {"rope_theta": 1000000.0}}


@dataclass(frozen=True, kw_only=True)
class Args(mistral.Args):
    num_local_experts: int
    num_experts_per_tok: int
    sliding_window: Count | None = None
    rms_norm_eps: float = 1e-5


class Layer(llama.Layer):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        hidden, inner, params = args.hidden_size, args.intermediate_size, RouterParams(args.num_experts_per_tok)
        self.mlp = MoE(hidden, inner, args.num_local_experts, params, mesh, args.hidden_act)


class Model(base.Model):
    LAYER = Layer
    RENAMED = {".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}
