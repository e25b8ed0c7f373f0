"""MiMo 7B (Xiaomi 2025, arXiv 2505.07608): Qwen2's layers; checkpoints ship a head for multi-token prediction."""

from __future__ import annotations

from .qwen2 import Args, Model

__all__ = ["Args", "Model"]
