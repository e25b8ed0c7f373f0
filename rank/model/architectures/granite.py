"""Granite 3 (IBM 2024): Llama with multipliers on embeddings, attention, residual branches and logits."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from ....comm.mesh import Mesh
from ....kernels.attention.attention import AttentionParams
from ....kernels.rope.rope import CosSin
from .. import base
from ..base import Divisor
from ..batch import Batch
from ..layers.residual import Normed, ResidualStream
from . import llama


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: Divisor = 1.0

    @property
    def embed_scale(self) -> float:
        return self.embedding_multiplier

    @property
    def logit_scale(self) -> float:
        return 1 / self.logits_scaling

    def attention_params(self, index: int) -> AttentionParams:
        return AttentionParams(scale=self.attention_multiplier)


class Layer(llama.Layer):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        self.multiplier = args.residual_multiplier

    def forward(self, stream: ResidualStream, cos_sin: CosSin, batch: Batch) -> Generator[Normed, None, None]:
        yield (h := self.input_layernorm(stream))
        stream.add(self.self_attn(h, cos_sin, batch) * self.multiplier)
        yield (h := self.post_attention_layernorm(stream))
        stream.add(self.mlp(h) * self.multiplier)


class Model(base.Model):
    LAYER = Layer
