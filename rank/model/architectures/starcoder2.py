"""StarCoder 2 (Lozhkov et al. 2024, arXiv 2402.19173): layer norms, biases, an ungated MLP, and sliding windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..base import Count
from ..layers.feed_forward import Dense
from . import llama, mistral

CONFIG = {"names": {"norm_epsilon": "layer_norm_eps", "use_bias": "attention_bias"}}


@dataclass(frozen=True, kw_only=True)
class Args(mistral.Args):
    layer_norms: ClassVar[bool] = True

    sliding_window: Count | None = None
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-5
    attention_bias: bool = True
    tie_word_embeddings: bool = True

    def feed_forward(self, index: int) -> Dense:
        return Dense(self.intermediate_size, self.hidden_act, self.attention_bias, gated=False)


class Model(llama.Model):
    MERGED = llama.Model.MERGED | {"up_proj": ("c_fc",), "down_proj": ("c_proj",)}
