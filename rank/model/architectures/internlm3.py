"""InternLM3 (Shanghai AI Laboratory 2025): Llama with one switch for the biases of attention and of the MLP."""

from __future__ import annotations

from dataclasses import dataclass

from .. import base
from . import llama

CONFIG = {"names": {"qkv_bias": "attention_bias", "bias": "mlp_bias"}, "defaults": {"head_dim": 128}}


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    rms_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        base.expect("qkv_bias", self.attention_bias, self.mlp_bias)


Model = llama.Model
