"""EXAONE 4 (LG AI Research 2025, arXiv 2507.11407): OLMo 2's norms after sublayers, QK norm of each head, and layers of
full attention among sliding ones, which alone rotate."""

from __future__ import annotations

from dataclasses import dataclass, field

from ....kernels.attention.attention import AttentionParams
from .. import base
from ..base import Count
from ..config import FULL, SLIDING
from ..layers.attention import layer_type
from ..layers.rope import NONE, Parameters
from . import llama, olmo2, qwen3


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    rms_norm_eps: float = 1e-5
    sliding_window: Count | None = 4096
    sliding_window_pattern: int | str | None = 4  # every so many layers attend to all; or "LLLG"
    layer_types: list[str] = field(default_factory=list)

    def layer_type(self, index: int) -> str:
        pattern = self.sliding_window_pattern or 0
        length = len(pattern) if isinstance(pattern, str) else pattern
        slides = self.sliding_window is not None and length > 0 and (index + 1) % length != 0
        return layer_type(self.layer_types, index, SLIDING if slides else FULL)

    def rope(self, index: int) -> Parameters:
        return NONE if self.sliding_window is not None and self.layer_type(index) == FULL else self.rope_parameters

    def attention_params(self, index: int) -> AttentionParams:
        window = self.sliding_window or 0
        return AttentionParams(scale=self.head_dim**-0.5, window=window if self.layer_type(index) == SLIDING else 0)


class Layer(olmo2.Layer):
    ATTENTION = qwen3.Attention


class Model(base.Model):
    LAYER = Layer
