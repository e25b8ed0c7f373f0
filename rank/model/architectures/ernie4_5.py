"""ERNIE 4.5, dense (Baidu 2025): Llama with rotated neighbours, and biases everywhere or nowhere."""

from __future__ import annotations

from dataclasses import dataclass

from ..layers.rope import Parameters
from . import llama

CONFIG = {"names": {"use_bias": "mlp_bias"}, "defaults": {"head_dim": 128, "rope_theta": 500000.0}}


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True

    @property
    def qkv_bias(self) -> bool:
        return self.mlp_bias

    @property
    def o_bias(self) -> bool:
        return self.mlp_bias

    def rope(self, index: int) -> Parameters:
        return self.rope_parameters | {"interleaved": True}


Model = llama.Model
