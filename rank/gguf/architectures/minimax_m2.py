"""MiniMax-M2."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import CORRECTION, DECODER, EXPERTS, QK_NORM, expert_keys, layer
from ._common import config as common

TENSORS = DECODER | EXPERTS | QK_NORM | layer(exp_probs_b="mlp.gate")
ENDINGS = CORRECTION
WRITES, NAME = ("minimax_m2",), "minimax-m2"


def config(m: Metadata) -> dict[str, Any]:
    keys = common(m)
    return keys | {
        "model_type": "minimax_m2",
        "num_local_experts": m.integer("expert_count"),
        "num_experts_per_tok": m.integer("expert_used_count"),
        "intermediate_size": m.integer("expert_feed_forward_length", keys["intermediate_size"]),
    }


def keys(raw: dict[str, Any]) -> dict[str, Any]:
    rotated = {"rope.dimension_count": raw["rotary_dim"]} if raw.get("rotary_dim") else {}
    return expert_keys(raw) | rotated | {"expert_feed_forward_length": raw["intermediate_size"]}
