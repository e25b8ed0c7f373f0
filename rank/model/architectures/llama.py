"""Llama 1 to 3 (Touvron et al. 2023, arXiv 2302.13971; arXiv 2407.21783) and the many models with its layers."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ....comm.mesh import Mesh
from ....kernels.attention.attention import AttentionParams
from ....kernels.rope.rope import CosSin, QKNorm
from .. import base
from ..batch import Batch
from ..cache_spec import PagedKV
from ..layers.attention import PagedAttention
from ..layers.feed_forward import Dense, FeedForward
from ..layers.linear import QKVParallel, RowParallel
from ..layers.norm import RMSNorm, add_norm
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

    @property
    def qk_norm(self) -> bool:
        """Whether each head's query and key are normed."""
        return False

    @property
    def parallel(self) -> bool:
        """Whether attention and MLP run side by side on one norm (Wang and Komatsuzaki 2021, GPT-J)."""
        return False

    @property
    def residual_multiplier(self) -> float:
        """A factor on what sublayers add to the residual stream."""
        return 1.0

    def window(self, index: int) -> int:
        """How many of the newest tokens a layer's attention reads; 0: all."""
        return 0

    def attention_params(self, index: int) -> AttentionParams:
        """The attention parameters of a layer: scale, window, soft cap."""
        return AttentionParams(scale=self.head_dim**-0.5, window=self.window(index))

    def feed_forward(self, index: int) -> FeedForward:
        """The feed-forward part of a layer."""
        return Dense(self.intermediate_size, self.hidden_act, self.mlp_bias)


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

    @property
    def norms(self) -> QKNorm | None:
        """The norm of each head's query and key, before the rotary embedding."""
        return None

    def forward(self, h: Normed, cos_sin: CosSin, batch: Batch) -> Partial:
        q, k, v = self.qkv_proj.split(self.qkv_proj(h))
        return self.o_proj(self.attention(h, q, k, v, cos_sin, batch, self.norms))


class NormedAttention(Attention):
    """With QK norm of each head."""

    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        self.q_norm = RMSNorm(args.head_dim, args.rms_norm_eps, args.norm_offset)
        self.k_norm = RMSNorm(args.head_dim, args.rms_norm_eps, args.norm_offset)

    @property
    def norms(self) -> QKNorm:
        return QKNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)


class Layer(base.Layer):
    ATTENTION: type[nn.Module] | None = None  # None: one of those above, as Args say
    self_attn: Any

    def __init__(self, args: Any, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        self.input_layernorm: Any = add_norm(args)
        self.make_mixer(args, mesh, index, local)
        self.post_attention_layernorm: Any = None if args.parallel else add_norm(args)
        self.mlp = args.feed_forward(index).make(args.hidden_size, mesh)
        self.multiplier = args.residual_multiplier

    def make_mixer(self, args: Any, mesh: Mesh, index: int, local: int) -> None:
        """Set the sublayer that mixes a sequence's tokens, which `mix` calls."""
        attention = self.ATTENTION or (NormedAttention if args.qk_norm else Attention)
        self.self_attn = attention(args, mesh, index, local)

    def mix(self, h: Normed, cos_sin: CosSin, batch: Batch) -> Partial:
        return self.self_attn(h, cos_sin, batch)

    def forward(self, stream: ResidualStream, cos_sin: CosSin, batch: Batch) -> Generator[Normed, None, None]:
        yield (h := self.input_layernorm(stream))
        mixed = self.mix(h, cos_sin, batch)
        if self.post_attention_layernorm is None:
            stream.add((mixed + self.mlp(h)) * self.multiplier)
            return
        stream.add(mixed * self.multiplier)
        yield (h := self.post_attention_layernorm(stream))
        stream.add(self.mlp(h) * self.multiplier)


class Model(base.Model):
    LAYER = Layer
