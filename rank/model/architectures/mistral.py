"""Mistral 7B and its successors (Jiang et al. 2023, arXiv 2310.06825): Llama with a sliding window."""

from __future__ import annotations

from dataclasses import dataclass

from ....kernels.attention.attention import AttentionParams
from ..base import Count
from . import llama


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    sliding_window: Count | None = 4096

    def attention_params(self, index: int) -> AttentionParams:
        return AttentionParams(scale=self.head_dim**-0.5, window=self.sliding_window or 0)


Model = llama.Model
