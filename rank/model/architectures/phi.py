"""Phi-1, Phi-1.5 and Phi-2 (Gunasekar et al. 2023, arXiv 2306.11644; Li et al. 2023, arXiv 2309.05463).

Attention and MLP run side by side on one layer norm, part of each head is rotated, and every linear has a bias, the
head too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .. import base
from ..layers.feed_forward import Dense
from . import llama

CONFIG = {"defaults": {"partial_rotary_factor": 0.5}}


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    qkv_bias: ClassVar[bool] = True
    o_bias: ClassVar[bool] = True
    head_bias: ClassVar[bool] = True
    layer_norms: ClassVar[bool] = True
    parallel: ClassVar[bool] = True

    hidden_act: str = "gelu_new"
    layer_norm_eps: float = 1e-5
    qk_layernorm: bool = False

    def __post_init__(self) -> None:
        for key in ("qk_layernorm", "tie_word_embeddings"):
            base.expect(key, getattr(self, key), False)

    def feed_forward(self, index: int) -> Dense:
        return Dense(self.intermediate_size, self.hidden_act, bias=True, gated=False)


class Model(llama.Model):
    MERGED = llama.Model.MERGED | {"o_proj": ("dense",), "up_proj": ("fc1",), "down_proj": ("fc2",)}
    RENAMED = {"model.final_layernorm.": "model.norm."}
