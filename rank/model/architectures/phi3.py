"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al. 2024, arXiv 2404.14219): Mistral's layers with fused qkv and gate_up."""

from __future__ import annotations

from dataclasses import dataclass

from ..base import Count
from . import mistral


@dataclass(frozen=True, kw_only=True)
class Args(mistral.Args):
    sliding_window: Count | None = None
    rms_norm_eps: float = 1e-5


Model = mistral.Model
