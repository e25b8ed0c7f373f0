"""Phi-1, Phi-1.5 and Phi-2 (Gunasekar et al. 2023, arXiv 2306.11644; Li et al. 2023, arXiv 2309.05463).

Attention and MLP run side by side on one layer norm (Wang and Komatsuzaki 2021, GPT-J), part of each head is rotated,
and every linear has a bias, the head too.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar

from ....comm.mesh import Mesh
from ....kernels.rope.rope import CosSin
from .. import base
from ..batch import Batch
from ..layers.mlp import MLP
from ..layers.norm import AddLayerNorm, LayerNorm
from ..layers.residual import Normed, ResidualStream
from . import llama

CONFIG = {"defaults": {"partial_rotary_factor": 0.5}}


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    qkv_bias: ClassVar[bool] = True
    o_bias: ClassVar[bool] = True
    head_bias: ClassVar[bool] = True

    hidden_act: str = "gelu_new"
    layer_norm_eps: float = 1e-5
    qk_layernorm: bool = False

    def __post_init__(self) -> None:
        for key in ("qk_layernorm", "tie_word_embeddings"):
            base.expect(key, getattr(self, key), False)


class Layer(base.Layer):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        self.input_layernorm = AddLayerNorm(args.hidden_size, args.layer_norm_eps)
        self.self_attn = llama.Attention(args, mesh, index, local)
        self.mlp = MLP(args.hidden_size, args.intermediate_size, mesh, args.hidden_act, bias=True)

    def forward(self, stream: ResidualStream, cos_sin: CosSin, batch: Batch) -> Generator[Normed, None, None]:
        yield (h := self.input_layernorm(stream))
        stream.add(self.self_attn(h, cos_sin, batch) + self.mlp(h))


class Decoder(base.Decoder):
    @staticmethod
    def final_norm(args: Any) -> LayerNorm:
        return LayerNorm(args.hidden_size, args.layer_norm_eps, offset=args.norm_offset)


class Model(base.Model):
    LAYER, DECODER = Layer, Decoder
    MERGED = base.Model.MERGED | {"o_proj": ("dense",), "up_proj": ("fc1",), "down_proj": ("fc2",)}
    RENAMED = {"model.final_layernorm.": "model.norm."}
