"""Falcon and Falcon 2 (Almazrouei et al. 2023, arXiv 2311.16867): attention and MLP side by side on one layer norm or
two, and one tensor of all that a key head has, of which small models have one alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from .. import base
from ..config import Config
from ..layers.feed_forward import Dense
from . import gpt_neox, internlm2, llama

CONFIG = {
    "names": {
        "num_kv_heads": "num_key_value_heads", "activation": "hidden_act", "layer_norm_epsilon": "layer_norm_eps",
        "bias": "attention_bias",
    }
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    layer_norms: ClassVar[bool] = True

    intermediate_size: int = 0  # is not read:
    ffn_hidden_size: int | None = None  # None: four times the hidden size
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-5
    alibi: bool = False
    multi_query: bool = True
    parallel_attn: bool = True
    new_decoder_architecture: bool = False
    num_ln_in_parallel_attn: int | None = None
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        base.expect("alibi", self.alibi, False)
        base.expect("num_ln_in_parallel_attn", self.num_ln_in_parallel_attn, None, 1, 2)
        if self.new_decoder_architecture:
            base.expect("parallel_attn", self.parallel_attn, True)

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """config.json counts a key for each head also where there is one alone."""
        made = super().from_config(config)
        alone = made.multi_query and not made.new_decoder_architecture
        return replace(made, num_key_value_heads=1) if alone else made

    @property
    def parallel(self) -> bool:
        if self.new_decoder_architecture:
            return self.num_ln_in_parallel_attn == 1
        return self.parallel_attn

    @property
    def use_parallel_residual(self) -> bool:
        """Whether attention and MLP run side by side on norms of their own."""
        return self.parallel_attn and not self.parallel

    def feed_forward(self, index: int) -> Dense:
        inner = self.ffn_hidden_size or 4 * self.hidden_size
        return Dense(inner, self.hidden_act, self.attention_bias, gated=False)


class Layer(gpt_neox.Layer):
    ATTENTION = internlm2.Attention


class Model(internlm2.Model):
    LAYER = Layer
    RENAMED = {
        "transformer.word_embeddings.": "model.embed_tokens.", "transformer.h.": "model.layers.",
        "transformer.ln_f.": "model.norm.", ".ln_attn.": ".input_layernorm.", ".ln_mlp.": ".post_attention_layernorm.",
        ".self_attention.query_key_value.": ".self_attn.qkv_proj.", ".self_attention.dense.": ".self_attn.o_proj.",
        ".mlp.dense_h_to_4h.": ".mlp.up_proj.", ".mlp.dense_4h_to_h.": ".mlp.down_proj.",
    }  # fmt: skip
