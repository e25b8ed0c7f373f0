"""dots.llm1 (rednote 2025, arXiv 2506.05767): Qwen3's attention with DeepSeek-V3's experts."""

from __future__ import annotations

from dataclasses import dataclass

from ..base import Count
from . import deepseek_v3, llama, qwen3


@dataclass(frozen=True, kw_only=True)
class Args(deepseek_v3.ExpertArgs, qwen3.Args):
    norm_topk_prob: bool = False
    first_k_dense_replace: int = 0
    use_sliding_window: bool = True
    sliding_window: Count | None = 4096
    max_window_layers: int = 62

    def __post_init__(self) -> None:
        if self.scoring_func == "noaux_tc":  # as the first checkpoints name it
            object.__setattr__(self, "scoring_func", "sigmoid")
        super().__post_init__()


Model = llama.Model
