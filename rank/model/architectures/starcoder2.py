"""StarCoder 2 (Lozhkov et al. 2024, arXiv 2402.19173): layer norms, biases, an ungated MLP, and sliding windows."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from ....comm.mesh import Mesh
from ....kernels.rope.rope import CosSin
from .. import base
from ..batch import Batch
from ..layers.mlp import MLP
from ..layers.norm import AddLayerNorm, LayerNorm
from ..layers.residual import Normed, ResidualStream
from . import llama, mistral


@dataclass(frozen=True, kw_only=True)
class Args(mistral.Args):
    hidden_act: str = "gelu_pytorch_tanh"
    norm_epsilon: float = 1e-5
    use_bias: bool = True
    tie_word_embeddings: bool = True

    @property
    def qkv_bias(self) -> bool:
        return self.use_bias

    @property
    def o_bias(self) -> bool:
        return self.use_bias


class Layer(base.Layer):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        self.input_layernorm = AddLayerNorm(args.hidden_size, args.norm_epsilon)
        self.self_attn = llama.Attention(args, mesh, index, local)
        self.post_attention_layernorm = AddLayerNorm(args.hidden_size, args.norm_epsilon)
        self.mlp = MLP(args.hidden_size, args.intermediate_size, mesh, args.use_bias, args.hidden_act)

    def forward(self, stream: ResidualStream, cos_sin: CosSin, batch: Batch) -> Generator[Normed, None, None]:
        yield (h := self.input_layernorm(stream))
        stream.add(self.self_attn(h, cos_sin, batch))
        yield (h := self.post_attention_layernorm(stream))
        stream.add(self.mlp(h))


class Decoder(base.Decoder):
    @staticmethod
    def final_norm(args: Any) -> LayerNorm:
        return LayerNorm(args.hidden_size, args.norm_epsilon)


class Model(base.Model):
    LAYER, DECODER = Layer, Decoder
    MERGED = base.Model.MERGED | {"up_proj": ("c_fc",), "down_proj": ("c_proj",)}
