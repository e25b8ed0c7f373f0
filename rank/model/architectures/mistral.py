"""Mistral 7B and its successors (Jiang et al. 2023, arXiv 2310.06825): Llama with a sliding window."""

from __future__ import annotations

from dataclasses import dataclass

from ..base import Count
from . import llama


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    sliding_window: Count | None = 4096

    def window(self, index: int) -> int:
        return self.sliding_window or 0


Model = llama.Model
