"""Qwen1.5-MoE and Qwen2-57B-A14B."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import DECODER, EXPERTS, expert_keys, experts, layer
from ._common import config as common

SHARED_EXPERT = layer(
    ffn_gate_inp_shexp="mlp.shared_expert_gate",
    ffn_gate_shexp="mlp.shared_expert.gate_proj",
    ffn_up_shexp="mlp.shared_expert.up_proj",
    ffn_down_shexp="mlp.shared_expert.down_proj",
)
TENSORS = DECODER | EXPERTS | SHARED_EXPERT
ONES = {"ffn_gate_inp_shexp": (0,)}
WRITES = ("qwen2_moe",)


def config(m: Metadata) -> dict[str, Any]:
    shared = m.integer("expert_shared_feed_forward_length")
    return common(m) | experts(m) | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": shared}


def keys(raw: dict[str, Any]) -> dict[str, Any]:
    return expert_keys(raw) | {"expert_shared_feed_forward_length": raw["shared_expert_intermediate_size"]}
