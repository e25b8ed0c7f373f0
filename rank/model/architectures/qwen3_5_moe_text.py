"""Qwen3.5 with experts, text (Qwen team 2026): in all layers, one of them visited by all tokens."""

from __future__ import annotations

from dataclasses import dataclass

from . import qwen3_5_text, qwen3_next

CONFIG = {"defaults": {"head_dim": 256, "partial_rotary_factor": 0.25}}


@dataclass(frozen=True, kw_only=True)
class Args(qwen3_next.Args):
    intermediate_size: int = 0  # no layer is dense


class Model(qwen3_5_text.Model):
    pass
