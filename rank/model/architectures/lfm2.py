"""LFM2 (Liquid AI 2025, arXiv 2511.23404): gated short convolutions, and attention with QK norm."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ....comm.mesh import Mesh
from ....kernels.rope.rope import CosSin
from .. import base
from ..base import Count, Divisor
from ..batch import Batch
from ..config import CONV, FULL
from ..layers.attention import layer_type
from ..layers.feed_forward import Dense
from ..layers.residual import Normed, Partial
from ..layers.short_conv import ShortConv
from . import llama

CONFIG = {
    "names": {"norm_eps": "rms_norm_eps", "block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"},
    "defaults": {"rope_theta": 1000000.0},
}


@dataclass(frozen=True, kw_only=True)
class ConvArgs(llama.Args):
    """Which layers have a convolution, and which."""

    qk_norm: ClassVar[bool] = True

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

    def feed_forward(self, index: int) -> Dense:
        """Inner sizes are two thirds of the key's, in whole multiples."""
        inner = self.intermediate_size
        if self.block_auto_adjust_ff_dim:
            inner = 2 * inner // 3
            if self.block_ffn_dim_multiplier is not None:
                inner = int(self.block_ffn_dim_multiplier * inner)
                inner = -(-inner // self.block_multiple_of) * self.block_multiple_of
        return Dense(inner, self.hidden_act)


class Layer(llama.Layer):
    def make_mixer(self, args: ConvArgs, mesh: Mesh, index: int, local: int) -> None:
        of = args.hidden_size, args.conv_L_cache, args.conv_bias, mesh, local
        self.conv = ShortConv(*of) if args.convolves(index) else None
        if self.conv is None:
            super().make_mixer(args, mesh, index, local)

    def mix(self, h: Normed, cos_sin: CosSin, batch: Batch) -> Partial:
        return super().mix(h, cos_sin, batch) if self.conv is None else self.conv(h, batch)


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
