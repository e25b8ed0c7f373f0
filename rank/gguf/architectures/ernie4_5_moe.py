"""ERNIE 4.5 with experts."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from . import ernie4_5
from ._common import CORRECTION, EXPERTS, SHARED_EXPERTS, experts, layer

TENSORS = ernie4_5.TENSORS | EXPERTS | SHARED_EXPERTS | layer(exp_probs_b="mlp.gate")
ENDINGS, ONES = CORRECTION, {"exp_probs_b": (0,)}
NAME = "ernie4_5-moe"


def config(m: Metadata) -> dict[str, Any]:
    return (
        ernie4_5.config(m)
        | experts(m)
        | {
            "model_type": "ernie4_5_moe",
            "moe_num_shared_experts": m.integer("expert_shared_count", 0),
            "moe_layer_start_index": m.integer("leading_dense_block_count", 0),
            "moe_layer_interval": m.integer("interleave_moe_layer_step", 1),
        }
    )
