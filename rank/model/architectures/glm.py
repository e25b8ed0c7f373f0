"""GLM-4-9B (GLM team 2024, arXiv 2406.12793): Llama with half of each head rotated, interleaved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..layers.rope import Parameters
from . import llama


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    o_bias: ClassVar[bool] = False

    rms_norm_eps: float = 1.5625e-7
    attention_bias: bool = True

    def rope(self, index: int) -> Parameters:
        return {"partial_rotary_factor": 0.5, **self.rope_parameters, "interleaved": True}


Model = llama.Model
