"""EXAONE 4 (LG AI Research 2025, arXiv 2507.11407): OLMo 2's norms after sublayers, QK norm of each head, and layers of
full attention among sliding ones, which alone rotate."""

from __future__ import annotations

from dataclasses import dataclass

from .. import base
from ..config import FULL, SLIDING
from ..layers.attention import layer_type
from ..layers.rope import NONE, Parameters
from . import llama, ministral, olmo2


@dataclass(frozen=True, kw_only=True)
class Args(ministral.Args):
    rms_norm_eps: float = 1e-5
    sliding_window_pattern: int | str | None = 4  # every so many layers attend to all; or "LLLG"

    def layer_type(self, index: int) -> str:
        pattern = self.sliding_window_pattern or 0
        length = len(pattern) if isinstance(pattern, str) else pattern
        slides = self.sliding_window is not None and length > 0 and (index + 1) % length != 0
        return layer_type(self.layer_types, index, SLIDING if slides else FULL)

    def rope(self, index: int) -> Parameters:
        return NONE if self.sliding_window is not None and self.layer_type(index) == FULL else self.rope_parameters


class Layer(olmo2.Layer):
    ATTENTION = llama.NormedAttention


class Model(base.Model):
    LAYER = Layer
