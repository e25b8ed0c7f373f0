"""OLMo (Groeneveld et al. 2024, arXiv 2402.00838): Llama with layer norms that have no weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....comm.mesh import Mesh
from ....kernels.rope.rope import CosSin
from .. import base
from ..base import Divisor
from ..batch import Batch
from ..layers.norm import AddLayerNorm, LayerNorm
from ..layers.residual import Normed, Partial
from . import llama

EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    clip_qkv: Divisor | None = None


class Attention(llama.Attention):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        self.clip = args.clip_qkv

    def forward(self, h: Normed, cos_sin: CosSin, batch: Batch) -> Partial:
        qkv = self.qkv_proj(h)
        q, k, v = self.qkv_proj.split(qkv if self.clip is None else qkv.clamp_(-self.clip, self.clip))
        return self.o_proj(self.attention(h, q, k, v, cos_sin, batch))


class FinalNorm(LayerNorm):
    fields = ()  # its weights are ones


class Norm(AddLayerNorm):
    fields = ()


class Layer(llama.Layer):
    ATTENTION = Attention

    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        self.input_layernorm = Norm(args.hidden_size, EPS, bias=False, offset=1.0)
        self.post_attention_layernorm = Norm(args.hidden_size, EPS, bias=False, offset=1.0)


class Decoder(base.Decoder):
    @staticmethod
    def final_norm(args: Any) -> LayerNorm:
        return FinalNorm(args.hidden_size, EPS, bias=False, offset=1.0)


class Model(base.Model):
    LAYER, DECODER = Layer, Decoder
