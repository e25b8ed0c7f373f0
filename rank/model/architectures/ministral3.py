"""Ministral 3 (Mistral AI 2025): Mistral with YaRN and, beyond the original context, an attention temperature."""

from __future__ import annotations

from dataclasses import dataclass

from ....errors import MODEL, FatalError
from ..base import Count
from . import llama, mistral

CONFIG = {"defaults": {"head_dim": 128}}


@dataclass(frozen=True, kw_only=True)
class Args(mistral.Args):
    sliding_window: Count | None = None
    rms_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for key in ("llama_4_scaling_beta", "original_max_position_embeddings"):
            if key not in self.rope_parameters:
                raise FatalError(f"config.json: rope_parameters has no {key}, which this model type needs", MODEL)


Model = llama.Model
