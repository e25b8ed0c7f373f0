"""GPT-NeoX and Pythia (Black et al. 2022, arXiv 2204.06745; arXiv 2304.01373): attention and MLP side by side on layer
norms of their own, part of each head rotated, and all of a head's query, key and value together."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from ....comm.mesh import Mesh
from ....kernels.rope.rope import CosSin
from .. import base
from ..batch import Batch
from ..cache_spec import PagedKV
from ..layers.attention import PagedAttention
from ..layers.linear import QKVParallel, RowParallel
from ..layers.residual import Normed, Partial, ResidualStream
from ..shard import even, scaled
from . import llama, phi

CONFIG = {
    "names": {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
    "defaults": {"partial_rotary_factor": 0.25},
}


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    layer_norms: ClassVar[bool] = True

    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-5
    attention_bias: bool = True
    use_parallel_residual: bool = True

    feed_forward = phi.Args.feed_forward


class HeadsTogether(QKVParallel):
    """Query, key and value of a head follow each other."""

    def __init__(self, args: Args, mesh: Mesh):
        heads, dim, group = args.num_attention_heads, args.head_dim, mesh.tensor
        super().__init__(args.hidden_size, heads, heads, dim, mesh, args.qkv_bias)
        self.outputs = (scaled(even(heads, group.rank, group.size), 3 * dim),)

    def split(self, qkv: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.contiguous() for x in qkv.view(len(qkv), -1, 3 * self.heads.dim).chunk(3, 2))


class Attention(nn.Module):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__()
        self.query_key_value = HeadsTogether(args, mesh)
        self.o_proj = RowParallel(args.num_attention_heads * args.head_dim, args.hidden_size, mesh, args.o_bias)
        self.attention = PagedAttention(local, args.attention_params(index))

    def cache_spec(self) -> PagedKV:
        heads = self.query_key_value.heads
        return PagedKV(heads.keys, heads.dim, heads.dim)

    def forward(self, h: Normed, cos_sin: CosSin, batch: Batch) -> Partial:
        q, k, v = self.query_key_value.split(self.query_key_value(h))
        return self.o_proj(self.attention(h, q, k, v, cos_sin, batch))


class Layer(llama.Layer):
    ATTENTION: type[nn.Module] | None = Attention

    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        self.beside = args.use_parallel_residual

    def forward(self, stream: ResidualStream, cos_sin: CosSin, batch: Batch) -> Generator[Normed, None, None]:
        if not self.beside:
            yield from super().forward(stream, cos_sin, batch)
            return
        yield (h := self.input_layernorm(stream))  # both norms read the same stream
        stream.add(self.self_attn(h, cos_sin, batch) + self.mlp(self.post_attention_layernorm(stream)))


class Model(base.Model):
    LAYER = Layer
    RENAMED = {
        "gpt_neox.": "model.",
        "model.embed_in.": "model.embed_tokens.",
        "model.final_layer_norm.": "model.norm.",
        "embed_out.": "lm_head.",
        ".attention.query_key_value.": ".self_attn.query_key_value.",
        ".attention.dense.": ".self_attn.o_proj.",
        ".dense_h_to_4h.": ".up_proj.",
        ".dense_4h_to_h.": ".down_proj.",
    }
