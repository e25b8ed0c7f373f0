"""Nemotron-4 and Minitron (Parmar et al. 2024, arXiv 2402.16819): Llama with layer norms whose weights are stored less
one, half of each head rotated, and an MLP that has no gate and squares its ReLU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ....comm.mesh import Mesh
from .. import base
from ..layers.mlp import MLP
from ..layers.norm import AddLayerNorm
from ..layers.rope import Parameters
from . import llama, phi

CONFIG = {"names": {"norm_eps": "layer_norm_eps"}}


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    hidden_act: str = "relu2"
    layer_norm_eps: float = 1e-5
    norm_offset: ClassVar[float] = 1.0

    def rope(self, index: int) -> Parameters:
        return {"partial_rotary_factor": 0.5} | self.rope_parameters


class Layer(base.Layer):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        self.input_layernorm = AddLayerNorm(args.hidden_size, args.layer_norm_eps, offset=args.norm_offset)
        self.self_attn = llama.Attention(args, mesh, index, local)
        self.post_attention_layernorm = AddLayerNorm(args.hidden_size, args.layer_norm_eps, offset=args.norm_offset)
        self.mlp = MLP(args.hidden_size, args.intermediate_size, mesh, args.hidden_act, args.mlp_bias)

    forward = llama.Layer.forward


class Model(base.Model):
    LAYER, DECODER = Layer, phi.Decoder
