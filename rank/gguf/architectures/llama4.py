"""Llama 4. As llama.cpp has it, files say neither chunks nor which layers rotate, and 128 experts mean Maverick."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import DECODER, EXPERTS
from ._common import config as common
from .qwen2moe import SHARED_EXPERT

TENSORS = DECODER | EXPERTS | SHARED_EXPERT
MAVERICK = 128  # experts of the model without QK norm


def config(m: Metadata) -> dict[str, Any]:
    keys, experts = common(m), m.integer("expert_count")
    return keys | {
        "model_type": "llama4_text",
        "intermediate_size": m.integer("expert_feed_forward_length"),
        "intermediate_size_mlp": keys["intermediate_size"],
        "num_local_experts": experts,
        "num_experts_per_tok": m.integer("expert_used_count"),
        "interleave_moe_layer_step": m.integer("interleave_moe_layer_step"),
        "use_qk_norm": experts != MAVERICK,
        "attention_bias": m.tensor("blk.0.attn_q.bias") is not None,
    }
