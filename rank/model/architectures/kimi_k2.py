"""Kimi K2 (Moonshot AI 2025, arXiv 2507.20534): DeepSeek-V3 with more experts and fewer heads."""

from __future__ import annotations

from .deepseek_v3 import Args, Model

__all__ = ["Args", "Model"]
CONFIG = {"names": {"qk_rope_head_dim": "head_dim"}}
