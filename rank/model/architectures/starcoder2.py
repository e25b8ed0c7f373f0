"""StarCoder 2 (Lozhkov et al. 2024, arXiv 2402.19173): layer norms, biases, an ungated MLP, and sliding windows."""

from __future__ import annotations

from dataclasses import dataclass

from ....comm.mesh import Mesh
from .. import base
from ..base import Count
from ..layers.mlp import MLP
from ..layers.norm import AddLayerNorm
from . import llama, mistral, phi

CONFIG = {"names": {"norm_epsilon": "layer_norm_eps", "use_bias": "attention_bias"}}


@dataclass(frozen=True, kw_only=True)
class Args(mistral.Args):
    sliding_window: Count | None = None
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-5
    attention_bias: bool = True
    tie_word_embeddings: bool = True


class Layer(base.Layer):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        self.input_layernorm = AddLayerNorm(args.hidden_size, args.layer_norm_eps)
        self.self_attn = llama.Attention(args, mesh, index, local)
        self.post_attention_layernorm = AddLayerNorm(args.hidden_size, args.layer_norm_eps)
        self.mlp = MLP(args.hidden_size, args.intermediate_size, mesh, args.hidden_act, args.attention_bias)

    forward = llama.Layer.forward


class Model(base.Model):
    LAYER, DECODER = Layer, phi.Decoder
    MERGED = base.Model.MERGED | {"up_proj": ("c_fc",), "down_proj": ("c_proj",)}
