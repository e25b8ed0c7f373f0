"""GPT-J (Wang and Komatsuzaki 2021): Phi's parallel layers with interleaved rope and no biases in attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ....comm.mesh import Mesh
from .. import base
from ..layers.mlp import MLP
from ..layers.norm import AddLayerNorm
from ..layers.rope import Parameters
from . import llama, phi

CONFIG = {
    "names": {
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "layer_norm_eps",
    }
}


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    head_bias: ClassVar[bool] = True

    intermediate_size: int = 0  # is not read:
    n_inner: int | None = None  # None: four times the hidden size
    hidden_act: str = "gelu_new"
    layer_norm_eps: float = 1e-5
    rotary_dim: int | None = 64  # None: all of a head

    def __post_init__(self) -> None:
        base.expect("tie_word_embeddings", self.tie_word_embeddings, False)

    def rope(self, index: int) -> Parameters:
        part = (self.rotary_dim or self.head_dim) / self.head_dim
        return self.rope_parameters | {"partial_rotary_factor": part, "interleaved": True}


class Layer(base.Layer):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        self.input_layernorm = AddLayerNorm(args.hidden_size, args.layer_norm_eps)
        self.self_attn = llama.Attention(args, mesh, index, local)
        self.mlp = MLP(args.hidden_size, args.n_inner or 4 * args.hidden_size, mesh, args.hidden_act, bias=True)

    forward = phi.Layer.forward


class Model(base.Model):
    LAYER, DECODER = Layer, phi.Decoder
    RENAMED = {
        "transformer.wte.": "model.embed_tokens.", "transformer.ln_f.": "model.norm.",
        "transformer.h.": "model.layers.", ".ln_1.": ".input_layernorm.", ".attn.": ".self_attn.",
        ".out_proj.": ".o_proj.", ".mlp.fc_in.": ".mlp.up_proj.", ".mlp.fc_out.": ".mlp.down_proj.",
    }  # fmt: skip
