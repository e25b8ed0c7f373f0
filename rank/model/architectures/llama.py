"""Llama 1 to 3 (Touvron et al. 2023, arXiv 2302.13971; arXiv 2407.21783) and the many models with its layers."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from torch import nn

from ....comm.mesh import Mesh
from ....kernels.attention.attention import AttentionParams
from ....kernels.rope.rope import CosSin
from .. import base
from ..batch import Batch
from ..cache_spec import PagedKV
from ..layers.attention import PagedAttention
from ..layers.linear import QKVParallel, RowParallel
from ..layers.mlp import GatedMLP
from ..layers.norm import AddRMSNorm
from ..layers.residual import Normed, Partial, ResidualStream


@dataclass(frozen=True, kw_only=True)
class Args(base.Args):
    intermediate_size: int
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def o_bias(self) -> bool:
        return self.attention_bias

    def attention_params(self, index: int) -> AttentionParams:
        """The attention parameters of a layer: scale, window, soft cap."""
        return AttentionParams(scale=self.head_dim**-0.5)


class Attention(nn.Module):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__()
        hidden, heads, dim = args.hidden_size, args.num_attention_heads, args.head_dim
        self.qkv_proj = QKVParallel(hidden, heads, args.num_key_value_heads, dim, mesh, args.qkv_bias)
        self.o_proj = RowParallel(heads * dim, hidden, mesh, args.o_bias)
        self.attention = PagedAttention(local, args.attention_params(index))

    def cache_spec(self) -> PagedKV:
        heads = self.qkv_proj.heads
        return PagedKV(heads.keys, heads.dim, heads.dim, self.attention.params.window)

    def forward(self, h: Normed, cos_sin: CosSin, batch: Batch) -> Partial:
        q, k, v = self.qkv_proj.split(self.qkv_proj(h))
        return self.o_proj(self.attention(h, q, k, v, cos_sin, batch))


class Layer(base.Layer):
    ATTENTION: type[nn.Module] = Attention

    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        self.input_layernorm = AddRMSNorm(args.hidden_size, args.rms_norm_eps, args.norm_offset)
        self.self_attn = self.ATTENTION(args, mesh, index, local)
        self.post_attention_layernorm = AddRMSNorm(args.hidden_size, args.rms_norm_eps, args.norm_offset)
        self.mlp: nn.Module = GatedMLP(args.hidden_size, args.intermediate_size, mesh, args.hidden_act, args.mlp_bias)

    def forward(self, stream: ResidualStream, cos_sin: CosSin, batch: Batch) -> Generator[Normed, None, None]:
        yield (h := self.input_layernorm(stream))
        stream.add(self.self_attn(h, cos_sin, batch))
        yield (h := self.post_attention_layernorm(stream))
        stream.add(self.mlp(h))


class Model(base.Model):
    LAYER = Layer
