"""Qwen3.5 with experts, text."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from . import _delta_net, qwen2moe, qwen35
from ._common import EXPERTS, experts

TENSORS = qwen35.TENSORS | EXPERTS | qwen2moe.SHARED_EXPERT
ENDINGS, ADDED, UNCHANGED = qwen35.ENDINGS, qwen35.ADDED, qwen35.UNCHANGED
LOGARITHMS, ONES = qwen35.LOGARITHMS, qwen35.ONES | qwen2moe.ONES
orders = qwen35.orders
WRITES = "qwen3_5_moe", "qwen3_5_moe_text"


def config(m: Metadata) -> dict[str, Any]:
    keys = _delta_net.config(m) | experts(m) | {"model_type": "qwen3_5_moe_text"}
    return keys | {"shared_expert_intermediate_size": m.integer("expert_shared_feed_forward_length")}


def keys(raw: dict[str, Any]) -> dict[str, Any]:
    return qwen35.keys(raw) | qwen2moe.keys(raw)
