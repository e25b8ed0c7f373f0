"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al. 2024, arXiv 2404.14219): Llama with fused qkv and gate_up."""

from __future__ import annotations

from dataclasses import dataclass

from ....kernels.attention.attention import AttentionParams
from . import llama


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    sliding_window: int | None = None

    def attention_params(self, index: int) -> AttentionParams:
        return AttentionParams(scale=self.head_dim**-0.5, window=self.sliding_window or 0)


Model = llama.Model
