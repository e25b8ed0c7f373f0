"""Qwen, the first (Bai et al. 2023, arXiv 2309.16609), up to the length that it was trained with: Qwen2 by other
names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .. import base
from ..layers.feed_forward import Dense
from . import llama

CONFIG = {
    "names": {
        "seq_length": "max_position_embeddings",  # beyond it queries and rope would change
        "kv_channels": "head_dim", "rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor",
        "layer_norm_epsilon": "rms_norm_eps",
    }
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    qkv_bias: ClassVar[bool] = True
    o_bias: ClassVar[bool] = False

    no_bias: bool = True
    scale_attn_weights: bool = True

    def __post_init__(self) -> None:
        base.expect("no_bias", self.no_bias, True)
        base.expect("scale_attn_weights", self.scale_attn_weights, True)

    def feed_forward(self, index: int) -> Dense:
        return Dense(self.intermediate_size // 2, self.hidden_act)  # of gate and up


class Model(llama.Model):
    RENAMED = {
        "transformer.wte.": "model.embed_tokens.", "transformer.ln_f.": "model.norm.",
        "transformer.h.": "model.layers.", ".ln_1.": ".input_layernorm.", ".ln_2.": ".post_attention_layernorm.",
        ".attn.c_attn.": ".self_attn.qkv_proj.", ".attn.c_proj.": ".self_attn.o_proj.",
        ".mlp.w2.": ".mlp.gate_proj.", ".mlp.w1.": ".mlp.up_proj.", ".mlp.c_proj.": ".mlp.down_proj.",
    }  # fmt: skip
