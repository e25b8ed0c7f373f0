"""LFM2 (Liquid AI 2025, arXiv 2511.23404): gated short convolutions, and attention with QK norm."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

from torch import nn

from ....comm.mesh import Mesh
from ....kernels.rope.rope import CosSin
from .. import base
from ..base import Count, Divisor
from ..batch import Batch
from ..config import CONV, FULL
from ..layers.attention import layer_type
from ..layers.mlp import GatedMLP
from ..layers.norm import AddRMSNorm
from ..layers.residual import Normed, ResidualStream
from ..layers.short_conv import ShortConv
from . import llama, qwen3

CONFIG = {
    "names": {"norm_eps": "rms_norm_eps", "block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"},
    "defaults": {"rope_theta": 1000000.0},
}


@dataclass(frozen=True, kw_only=True)
class ConvArgs(llama.Args):
    """Which layers have a convolution, and which."""

    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    conv_bias: bool = False
    conv_L_cache: Count = 3  # tokens that the convolution reads, this one included
    layer_types: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        base.expect("hidden_act", self.hidden_act, "silu")

    def convolves(self, index: int) -> bool:
        return layer_type(self.layer_types, index, FULL, (FULL, CONV)) == CONV

    @property
    def draft_layer(self) -> int:
        full = (index for index in reversed(range(self.num_hidden_layers)) if not self.convolves(index))
        return next(full, self.num_hidden_layers - 1)


@dataclass(frozen=True, kw_only=True)
class Args(ConvArgs):
    full_attn_idxs: list[int] | None = None  # the layers with attention, where layer_types does not say
    block_auto_adjust_ff_dim: bool = True
    block_ffn_dim_multiplier: Divisor | None = 1.0
    block_multiple_of: Count = 256

    def convolves(self, index: int) -> bool:
        if not self.layer_types and self.full_attn_idxs is not None:
            return index not in self.full_attn_idxs
        return super().convolves(index)

    @property
    def inner(self) -> int:
        """The inner size of feed-forward layers: two thirds of the key's, in whole multiples."""
        if not self.block_auto_adjust_ff_dim:
            return self.intermediate_size
        inner = 2 * self.intermediate_size // 3
        if self.block_ffn_dim_multiplier is None:
            return inner
        inner = int(self.block_ffn_dim_multiplier * inner)
        return -(-inner // self.block_multiple_of) * self.block_multiple_of


class ConvLayer(base.Layer):
    def __init__(self, args: ConvArgs, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        hidden, eps = args.hidden_size, args.rms_norm_eps
        self.input_layernorm = AddRMSNorm(hidden, eps)
        if args.convolves(index):
            self.conv = ShortConv(hidden, args.conv_L_cache, args.conv_bias, mesh, local)
        else:
            self.self_attn = qwen3.Attention(args, mesh, index, local)
        self.post_attention_layernorm = AddRMSNorm(hidden, eps)
        self.mlp: nn.Module

    def forward(self, stream: ResidualStream, cos_sin: CosSin, batch: Batch) -> Generator[Normed, None, None]:
        yield (h := self.input_layernorm(stream))
        stream.add(self.conv(h, batch) if hasattr(self, "conv") else self.self_attn(h, cos_sin, batch))
        yield (h := self.post_attention_layernorm(stream))
        stream.add(self.mlp(h))


class Layer(ConvLayer):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        self.mlp = GatedMLP(args.hidden_size, args.inner, mesh, "silu")


class Model(base.Model):
    LAYER = Layer
    RENAMED = {
        "model.embedding_norm.": "model.norm.",
        ".operator_norm.": ".input_layernorm.",
        ".ffn_norm.": ".post_attention_layernorm.",
        ".self_attn.out_proj.": ".self_attn.o_proj.",
        ".self_attn.q_layernorm.": ".self_attn.q_norm.",
        ".self_attn.k_layernorm.": ".self_attn.k_norm.",
        ".feed_forward.": ".mlp.",
        ".w1.": ".gate_proj.",
        ".w3.": ".up_proj.",
        ".w2.": ".down_proj.",
    }
