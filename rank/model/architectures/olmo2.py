"""OLMo 2 (OLMo team 2024, arXiv 2501.00656): norms after sublayers instead of before, and QK norm over all heads."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from ....comm.mesh import Mesh
from ....kernels.rope.rope import CosSin
from .. import base
from ..batch import Batch
from ..layers.attention import ShardedRMSNorm, norm_projections
from ..layers.mlp import GatedMLP
from ..layers.norm import PostNorm
from ..layers.residual import Normed, Partial, ResidualStream, Unnormed
from . import llama


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    rms_norm_eps: float = 1e-5
    clip_qkv: float | None = None

    def __post_init__(self) -> None:
        base.expect("clip_qkv", self.clip_qkv, None)


class Attention(llama.Attention):
    def __init__(self, args: llama.Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        queries, keys, _ = self.qkv_proj.outputs
        self.q_norm = ShardedRMSNorm(queries, args.rms_norm_eps)
        self.k_norm = ShardedRMSNorm(keys, args.rms_norm_eps)
        self.group = mesh.tensor

    def forward(self, h: Normed, cos_sin: CosSin, batch: Batch) -> Partial:
        q, k, v = self.qkv_proj.split(self.qkv_proj(h))
        q, k = norm_projections((self.q_norm, self.k_norm), q, k, self.group)
        return self.o_proj(self.attention(h, q, k, v, cos_sin, batch))


class Layer(base.Layer):
    ATTENTION: type[llama.Attention] = Attention

    def __init__(self, args: llama.Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        self.self_attn = self.ATTENTION(args, mesh, index, local)
        self.post_attention_layernorm = PostNorm(args.hidden_size, args.rms_norm_eps)
        self.mlp = GatedMLP(args.hidden_size, args.intermediate_size, mesh, args.hidden_act)
        self.post_feedforward_layernorm = PostNorm(args.hidden_size, args.rms_norm_eps)

    def forward(self, stream: ResidualStream, cos_sin: CosSin, batch: Batch) -> Generator[Normed, None, None]:
        yield (h := Unnormed(stream))
        stream.add(self.post_attention_layernorm(self.self_attn(h, cos_sin, batch).sum()))
        yield (h := Unnormed(stream))
        stream.add(self.post_feedforward_layernorm(self.mlp(h).sum()))


class Model(base.Model):
    LAYER = Layer
