"""Qwen3-Next. The first files have all of a key head together in one matrix (ssm_in), as its own checkpoints have it.

Later ones have queries, keys and values one after the other. Of that form are Qwen3.5's layers, which compute alike.
b and a lie together for each key head in both.
"""

from __future__ import annotations

from typing import Any

from ...safetensors_header import Order
from ..metadata import Metadata
from . import _delta_net, qwen2moe
from ._common import EXPERTS, experts, layer

TENSORS = (
    _delta_net.TENSORS
    | layer(ssm_in="linear_attn.in_proj_qkvz", ssm_ba="linear_attn.in_proj_ba")
    | EXPERTS
    | qwen2moe.SHARED_EXPERT
)
ENDINGS, ADDED, UNCHANGED = _delta_net.ENDINGS, _delta_net.ADDED, _delta_net.UNCHANGED
LOGARITHMS, ONES = _delta_net.LOGARITHMS, _delta_net.ONES | qwen2moe.ONES
WRITES = ("qwen3_next",)  # in their first form


def config(m: Metadata) -> dict[str, Any]:
    keys = _delta_net.config(m) | experts(m)
    together = any(m.tensor(f"blk.{i}.ssm_in.weight") for i in range(keys["num_hidden_layers"]))
    return keys | {
        "model_type": "qwen3_next" if together else "qwen3_5_moe_text",
        "shared_expert_intermediate_size": m.integer("expert_shared_feed_forward_length"),
    }


def orders(config: dict[str, Any]) -> dict[str, Order]:
    heads, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    grouped = config["model_type"] == "qwen3_next"
    return {} if grouped else {"ssm_ba": Order(heads, 2, values // max(heads, 1))}


def keys(raw: dict[str, Any]) -> dict[str, Any]:
    return _delta_net.keys(raw) | qwen2moe.keys(raw)
