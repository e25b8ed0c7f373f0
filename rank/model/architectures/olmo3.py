"""OLMo 3 (OLMo team 2025, arXiv 2512.13961): OLMo 2 with three sliding layers to one of full attention, and only the
latter's rope is scaled."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import FULL, SLIDING
from ..layers.attention import layer_type
from ..layers.rope import Parameters
from . import ministral, olmo2

CONFIG = {"defaults": {"rope_theta": 500000.0}, "rope_per_layer_type": True}


@dataclass(frozen=True, kw_only=True)
class Args(ministral.Args, olmo2.Args):
    rms_norm_eps: float = 1e-5

    def layer_type(self, index: int) -> str:
        return layer_type(self.layer_types, index, SLIDING if (index + 1) % 4 else FULL)

    def rope(self, index: int) -> Parameters:
        return self.rope_parameters[self.layer_type(index)]


Model = olmo2.Model
