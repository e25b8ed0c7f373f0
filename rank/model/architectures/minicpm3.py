"""MiniCPM3 (OpenBMB 2024, arXiv 2404.06395): dense layers with DeepSeek-V2's latent attention, and multipliers on the
embedding, residual branches and logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ....errors import MODEL, FatalError
from .. import base
from ..layers.mla import LatentSizes
from . import deepseek_v2, llama

# The part of a head that is rotated stands for the head where rotary embeddings are made.
CONFIG = {"names": {"qk_rope_head_dim": "head_dim", "scale_emb": "embed_scale"}, "defaults": {"head_dim": 32}}


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    kv_lora_rank: int = 256
    q_lora_rank: int | None = 768  # None: queries have no latent
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 32
    v_head_dim: int | None = None
    embed_scale: float = 12.0
    scale_depth: float | None = 1.4
    dim_model_base: int | None = 256

    def __post_init__(self) -> None:
        if self.attention_bias and not self.q_lora_rank:
            raise FatalError("config.json: attention_bias without q_lora_rank is not supported", MODEL)

    @property
    def residual_multiplier(self) -> float:
        return 1.0 if self.scale_depth is None else self.scale_depth / math.sqrt(self.num_hidden_layers)

    @property
    def logit_scale(self) -> float:
        return (self.dim_model_base or self.hidden_size) / self.hidden_size

    @property
    def latent_sizes(self) -> LatentSizes:
        value = self.v_head_dim or self.hidden_size // self.num_attention_heads
        return LatentSizes(
            self.num_attention_heads, self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim, value,
            self.q_lora_rank or 0,
        )  # fmt: skip

    attention_params = deepseek_v2.Args.attention_params


class Layer(llama.Layer):
    ATTENTION = deepseek_v2.Attention


class Model(base.Model):
    LAYER, MERGED = Layer, deepseek_v2.Model.MERGED
