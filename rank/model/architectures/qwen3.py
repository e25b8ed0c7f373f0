"""Qwen3, dense (Yang et al. 2025, arXiv 2505.09388): Llama with QK norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from . import llama, qwen2

CONFIG = {"defaults": {"head_dim": 128}}


@dataclass(frozen=True, kw_only=True)
class Args(qwen2.Args):
    qk_norm: ClassVar[bool] = True

    qkv_bias, o_bias = llama.Args.qkv_bias, llama.Args.o_bias


Model = llama.Model
