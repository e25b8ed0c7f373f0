"""Gemma 3, text (Gemma team 2025, arXiv 2503.19786): Gemma 2 with QK norm instead of soft caps, five sliding layers to
one of full attention, and a rope for each of the two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..base import Count
from ..config import FULL, SLIDING
from ..layers.attention import layer_type
from ..layers.rope import Parameters
from . import gemma2

CONFIG = {
    "defaults": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
    },
    "rope_per_layer_type": True,
}


@dataclass(frozen=True, kw_only=True)
class Args(gemma2.Args):
    qk_norm: ClassVar[bool] = True

    sliding_window_pattern: Count = 6
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None

    def layer_type(self, index: int) -> str:
        return layer_type(self.layer_types, index, SLIDING if (index + 1) % self.sliding_window_pattern else FULL)

    def rope(self, index: int) -> Parameters:
        return self.rope_parameters[self.layer_type(index)]


Model = gemma2.Model
