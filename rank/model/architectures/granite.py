"""Granite 3 (IBM 2024): Llama with multipliers on embeddings, attention, residual branches and logits."""

from __future__ import annotations

from dataclasses import dataclass

from ....kernels.attention.attention import AttentionParams
from ..base import Divisor
from . import llama


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: Divisor = 1.0

    @property
    def embed_scale(self) -> float:
        return self.embedding_multiplier

    @property
    def logit_scale(self) -> float:
        return 1 / self.logits_scaling

    def attention_params(self, index: int) -> AttentionParams:
        return AttentionParams(scale=self.attention_multiplier)


Model = llama.Model
