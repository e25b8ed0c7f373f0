"""Command R7B and Command A (Cohere 2025, arXiv 2504.00698): attention and MLP side by side on one layer norm; three
layers with a window and interleaved rope to one of full attention without positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .. import base
from ..base import Count
from ..config import FULL, SLIDING
from ..layers.attention import layer_type
from ..layers.rope import NONE, Parameters
from . import llama, ministral


@dataclass(frozen=True, kw_only=True)
class Args(ministral.Args):
    layer_norms: ClassVar[bool] = True
    norm_bias: ClassVar[bool] = False
    parallel: ClassVar[bool] = True

    layer_norm_eps: float = 1e-5
    logit_scale: float = 0.0625
    sliding_window_pattern: Count = 4
    use_parallel_block: bool = True
    use_gated_activation: bool = True
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        for key in ("use_parallel_block", "use_gated_activation"):
            base.expect(key, getattr(self, key), True)

    def layer_type(self, index: int) -> str:
        return layer_type(self.layer_types, index, SLIDING if (index + 1) % self.sliding_window_pattern else FULL)

    def rope(self, index: int) -> Parameters:
        return {**self.rope_parameters, "interleaved": True} if self.layer_type(index) == SLIDING else NONE


Model = llama.Model
