"""GLM-4.5 and GLM-4.6, also Air (Zeng et al. 2025, arXiv 2508.06471): Llama with partly rotated heads and, behind the
first layers, experts chosen as in DeepSeek-V3 (arXiv 2412.19437)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from . import deepseek_v3, llama

CONFIG = {"names": {"num_local_experts": "n_routed_experts", "use_qk_norm": "qk_norm"}}


@dataclass(frozen=True, kw_only=True)
class Args(deepseek_v3.ExpertArgs):
    o_bias: ClassVar[bool] = False

    rms_norm_eps: float = 1e-5
    n_shared_experts: int = 1
    qk_norm: bool = False


Model = llama.Model
