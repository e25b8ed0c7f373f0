"""gpt-oss. Files have gate and up of the experts apart, where its own checkpoints interleave them."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import DECODER, EXPERTS, expert_keys, layer
from ._common import config as common

TENSORS = (
    DECODER
    | EXPERTS
    | layer(
        post_attention_norm="post_attention_layernorm", attn_sinks="self_attn", ffn_gate_inp="mlp.router",
    )
)  # fmt: skip
ENDINGS = {"attn_sinks.weight": "sinks"}
WRITES, NAME = ("gpt_oss",), "gpt-oss"


def config(m: Metadata) -> dict[str, Any]:
    keys = common(m)
    if keys["rope_parameters"].get("rope_type") == "yarn":
        keys["rope_parameters"]["truncate"] = False
    return keys | {
        "model_type": "gpt_oss",
        "num_local_experts": m.integer("expert_count"),
        "num_experts_per_tok": m.integer("expert_used_count"),
        "intermediate_size": m.integer("expert_feed_forward_length", keys["intermediate_size"]),
        "sliding_window": m.integer("attention.sliding_window"),
        "attention_bias": m.tensor("blk.0.attn_q.bias") is not None,
    }


def keys(raw: dict[str, Any]) -> dict[str, Any]:
    inner = raw["intermediate_size"]
    return expert_keys(raw) | {
        "expert_feed_forward_length": inner,
        "attention.sliding_window": raw["sliding_window"],
    }
