"""Qwen3 with experts: 30B-A3B, 235B-A22B (Yang et al. 2025, arXiv 2505.09388)."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import SLIDING
from . import llama, qwen3
from .qwen2_moe import ExpertArgs


@dataclass(frozen=True, kw_only=True)
class Args(ExpertArgs, qwen3.Args):
    def layer_type(self, index: int) -> str:
        """All layers slide where one does: max_window_layers and layer_types have no effect."""
        return SLIDING


Model = llama.Model
