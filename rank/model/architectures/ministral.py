"""Ministral 8B (Mistral AI 2024): Mistral's layers, of which some may attend to all tokens and others to a window."""

from __future__ import annotations

from dataclasses import dataclass, field

from ....kernels.attention.attention import AttentionParams
from ..config import FULL, SLIDING
from ..layers.attention import layer_type
from . import llama, mistral


@dataclass(frozen=True, kw_only=True)
class Args(mistral.Args):
    layer_types: list[str] = field(default_factory=list)

    def layer_type(self, index: int) -> str:
        return layer_type(self.layer_types, index, SLIDING if self.sliding_window else FULL)

    def attention_params(self, index: int) -> AttentionParams:
        slides = self.layer_type(index) == SLIDING
        return AttentionParams(scale=self.head_dim**-0.5, window=(self.sliding_window or 0) if slides else 0)


Model = llama.Model
