"""Ministral 8B (Mistral AI 2024): Mistral's layers, of which some may attend to all tokens and others to a window."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..config import FULL, SLIDING
from ..layers.attention import layer_type
from . import llama, mistral


@dataclass(frozen=True, kw_only=True)
class Args(mistral.Args):
    layer_types: list[str] = field(default_factory=list)

    def layer_type(self, index: int) -> str:
        return layer_type(self.layer_types, index, SLIDING if self.sliding_window else FULL)

    def window(self, index: int) -> int:
        return super().window(index) if self.layer_type(index) == SLIDING else 0


Model = llama.Model
