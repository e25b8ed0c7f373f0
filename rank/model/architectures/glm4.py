"""GLM-4-0414 (Zhipu AI 2025): GLM's attention, with a norm after each sublayer as well as before it."""

from __future__ import annotations

from collections.abc import Generator

from ....comm.mesh import Mesh
from ....kernels.rope.rope import CosSin
from .. import base
from ..batch import Batch
from ..layers.norm import PostNorm, norm
from ..layers.residual import Normed, ResidualStream
from . import glm, llama

Args = glm.Args


class Layer(llama.Layer):
    def __init__(self, args: llama.Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        self.post_self_attn_layernorm, self.post_mlp_layernorm = (norm(args, PostNorm) for _ in range(2))

    def forward(self, stream: ResidualStream, cos_sin: CosSin, batch: Batch) -> Generator[Normed, None, None]:
        yield (h := self.input_layernorm(stream))
        stream.add(self.post_self_attn_layernorm(self.self_attn(h, cos_sin, batch).sum()))
        yield (h := self.post_attention_layernorm(stream))
        stream.add(self.post_mlp_layernorm(self.mlp(h).sum()))


class Model(base.Model):
    LAYER = Layer
