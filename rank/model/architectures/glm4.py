"""GLM-4-0414 (Zhipu AI 2025): GLM's attention, with a norm after each sublayer as well as before it."""

from __future__ import annotations

from . import gemma2, glm

Args = glm.Args


class Model(gemma2.Model):
    RENAMED = {
        ".post_attention_layernorm.": ".pre_feedforward_layernorm.",
        ".post_self_attn_layernorm.": ".post_attention_layernorm.",
        ".post_mlp_layernorm.": ".post_feedforward_layernorm.",
    }
