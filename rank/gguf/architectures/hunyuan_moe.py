"""Hunyuan with experts: A13B."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from . import hunyuan_dense
from ._common import EXPERTS, SHARED_EXPERTS

TENSORS = hunyuan_dense.TENSORS | EXPERTS | SHARED_EXPERTS
NAME = "hunyuan-moe"


def config(m: Metadata) -> dict[str, Any]:
    return hunyuan_dense.config(m) | {
        "model_type": "hunyuan_v1_moe",
        "intermediate_size": m.integer("expert_feed_forward_length"),
        "num_experts": m.integer("expert_count"),
        "moe_topk": m.integer("expert_used_count"),
    }
