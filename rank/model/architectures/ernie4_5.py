"""ERNIE 4.5, dense (Baidu 2025): Llama with rotated neighbours, and biases everywhere or nowhere."""

from __future__ import annotations

from dataclasses import dataclass

from ....comm.mesh import Mesh
from .. import base
from ..layers.mlp import GatedMLP
from ..layers.rope import Parameters
from . import llama

CONFIG = {"defaults": {"head_dim": 128, "rope_theta": 500000.0}}


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    use_bias: bool = False

    @property
    def qkv_bias(self) -> bool:
        return self.use_bias

    @property
    def o_bias(self) -> bool:
        return self.use_bias

    def rope(self, index: int) -> Parameters:
        return self.rope_parameters | {"interleaved": True}


class Layer(llama.Layer):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        self.mlp = GatedMLP(args.hidden_size, args.intermediate_size, mesh, args.hidden_act, args.use_bias)


class Model(base.Model):
    LAYER = Layer
