"""Nemotron-4 and Minitron (Parmar et al. 2024, arXiv 2402.16819): Llama with layer norms whose weights are stored less
one, half of each head rotated, and an MLP that has no gate and squares its ReLU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..layers.rope import Parameters
from . import arcee, llama

CONFIG = {"names": {"norm_eps": "layer_norm_eps"}}


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    hidden_act: str = "relu2"
    layer_norm_eps: float = 1e-5
    norm_offset: ClassVar[float] = 1.0
    layer_norms: ClassVar[bool] = True

    feed_forward = arcee.Args.feed_forward

    def rope(self, index: int) -> Parameters:
        return {"partial_rotary_factor": 0.5} | self.rope_parameters


Model = llama.Model
