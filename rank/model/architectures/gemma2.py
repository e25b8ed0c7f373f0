"""Gemma 2 (Gemma team 2024, arXiv 2408.00118): post-norms, soft caps, and sliding windows."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

from ....comm.mesh import Mesh
from ....kernels.attention.attention import AttentionParams
from ....kernels.rope.rope import CosSin
from .. import base
from ..base import Divisor
from ..batch import Batch
from ..config import FULL, SLIDING
from ..layers.attention import layer_type
from ..layers.feed_forward import Dense
from ..layers.norm import PostNorm, add_norm, norm
from ..layers.residual import Normed, ResidualStream
from . import gemma, llama, ministral

CONFIG = {"defaults": {"head_dim": 256}}


@dataclass(frozen=True, kw_only=True)
class Args(ministral.Args):
    norm_offset: ClassVar[float] = 1.0

    hidden_activation: str = "gelu_pytorch_tanh"
    query_pre_attn_scalar: Divisor = 256.0
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0
    tie_word_embeddings: bool = True
    use_bidirectional_attention: bool = False

    def __post_init__(self) -> None:
        gemma.check_direction(self.use_bidirectional_attention)

    @property
    def embed_scale(self) -> float:
        return self.hidden_size**0.5

    @property
    def logit_softcap(self) -> float:
        return self.final_logit_softcapping or 0.0

    def layer_type(self, index: int) -> str:
        return layer_type(self.layer_types, index, FULL if index % 2 else SLIDING)

    def attention_params(self, index: int) -> AttentionParams:
        cap = self.attn_logit_softcapping or 0.0
        return AttentionParams(self.query_pre_attn_scalar**-0.5, self.window(index), cap)

    def feed_forward(self, index: int) -> Dense:
        return Dense(self.intermediate_size, self.hidden_activation)


class Layer(llama.Layer):
    def __init__(self, args: llama.Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        self.pre_feedforward_layernorm = add_norm(args)
        self.post_attention_layernorm, self.post_feedforward_layernorm = (norm(args, PostNorm) for _ in range(2))

    def forward(self, stream: ResidualStream, cos_sin: CosSin, batch: Batch) -> Generator[Normed, None, None]:
        yield (h := self.input_layernorm(stream))
        stream.add(self.post_attention_layernorm(self.self_attn(h, cos_sin, batch).sum()))
        yield (h := self.pre_feedforward_layernorm(stream))
        stream.add(self.post_feedforward_layernorm(self.mlp(h).sum()))


class Model(base.Model):
    LAYER = Layer
