"""MiniMax-M2."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import CORRECTION, DECODER, EXPERTS, QK_NORM, layer
from ._common import config as common

TENSORS = DECODER | EXPERTS | QK_NORM | layer(exp_probs_b="mlp.gate")
ENDINGS = CORRECTION


def config(m: Metadata) -> dict[str, Any]:
    keys = common(m)
    return keys | {
        "model_type": "minimax_m2",
        "num_local_experts": m.integer("expert_count"),
        "num_experts_per_tok": m.integer("expert_used_count"),
        "intermediate_size": m.integer("expert_feed_forward_length", keys["intermediate_size"]),
    }
