"""Command R and R+ (Cohere 2024), also Aya 23: attention and MLP side by side on one layer norm, interleaved rope, and
in the larger models a layer norm for each head's queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ....comm.mesh import Mesh
from ....kernels.norm.norm import layer_norm
from ....kernels.rope.rope import CosSin
from ..batch import Batch
from ..layers.residual import Normed, Partial
from ..layers.rope import Parameters
from ..shard import Shard, even, key_heads, whole
from ..weights.slicing import Field, ShardedModule, parameter
from . import llama

CONFIG = {"defaults": {"rope_theta": 500000.0}}


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    layer_norms: ClassVar[bool] = True
    norm_bias: ClassVar[bool] = False
    parallel: ClassVar[bool] = True

    layer_norm_eps: float = 1e-5
    logit_scale: float = 0.0625
    use_qk_norm: bool = False
    tie_word_embeddings: bool = True

    def rope(self, index: int) -> Parameters:
        return self.rope_parameters | {"interleaved": True}


class HeadLayerNorms(ShardedModule):
    """A layer norm for each of this rank's heads, with a weight and no bias."""

    fields = (Field("weight", "oi"),)

    def __init__(self, heads: Shard, dim: int, eps: float):
        super().__init__()
        self.inputs, self.outputs, self.eps = whole(dim), (heads,), eps
        self.weight = parameter(heads.width, dim)

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, heads, dim]."""
        return layer_norm(x, self.weight, None, self.eps)


class Attention(llama.Attention):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        self.q_norm = self.k_norm = None
        if args.use_qk_norm:
            group, dim, eps = mesh.tensor, args.head_dim, args.layer_norm_eps
            self.q_norm = HeadLayerNorms(even(args.num_attention_heads, group.rank, group.size), dim, eps)
            self.k_norm = HeadLayerNorms(key_heads(args.num_key_value_heads, group.rank, group.size), dim, eps)

    def forward(self, h: Normed, cos_sin: CosSin, batch: Batch) -> Partial:
        q, k, v = self.qkv_proj.split(self.qkv_proj(h))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.o_proj(self.attention(h, q, k, v, cos_sin, batch))


class Layer(llama.Layer):
    ATTENTION = Attention


class Model(llama.Model):
    LAYER = Layer
