"""Arcee's AFM (Arcee AI 2025): Llama with an MLP that has no gate and squares its ReLU."""

from __future__ import annotations

from dataclasses import dataclass

from ..layers.feed_forward import Dense
from . import llama


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    hidden_act: str = "relu2"
    rms_norm_eps: float = 1e-5

    def feed_forward(self, index: int) -> Dense:
        return Dense(self.intermediate_size, self.hidden_act, self.mlp_bias, gated=False)


Model = llama.Model
