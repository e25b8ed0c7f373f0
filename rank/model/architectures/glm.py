"""GLM-4-9B (GLM team 2024, arXiv 2406.12793): Llama with half of each head rotated, in interleaved pairs."""

from __future__ import annotations

from dataclasses import dataclass

from ..layers.rope import Parameters
from . import llama


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    rms_norm_eps: float = 1.5625e-7
    attention_bias: bool = True

    @property
    def o_bias(self) -> bool:
        return False

    def rope(self, index: int) -> Parameters:
        return {"partial_rotary_factor": 0.5, **self.rope_parameters, "interleaved": True}


Model = llama.Model
