"""dots.llm1."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import CORRECTION, DECODER, EXPERTS, QK_NORM, SHARED_EXPERTS, SIGMOID, experts, layer, routed_keys
from ._common import config as common

TENSORS = DECODER | QK_NORM | EXPERTS | SHARED_EXPERTS | layer(exp_probs_b="mlp.gate")
ENDINGS = CORRECTION
WRITES = ("dots1",)


def config(m: Metadata) -> dict[str, Any]:
    window = m.integer("attention.sliding_window", 0)
    return (
        common(m)
        | experts(m)
        | {
            "model_type": "dots1",
            "n_routed_experts": m.integer("expert_count"),
            "n_shared_experts": m.integer("expert_shared_count"),
            "n_group": m.integer("expert_group_count", 1),
            "topk_group": m.integer("expert_group_used_count", 1),
            "first_k_dense_replace": m.integer("leading_dense_block_count", 0),
            "routed_scaling_factor": m.number("expert_weights_scale", 1.0),
            "norm_topk_prob": m.flag("expert_weights_norm", False),
            "sliding_window": window or None,
        }
    )


def keys(raw: dict[str, Any]) -> dict[str, Any]:
    return routed_keys(raw) | {"expert_gating_func": SIGMOID}
