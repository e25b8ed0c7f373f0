"""GLM-4-0414."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import DECODER, head_dim, layer
from ._common import config as common

TENSORS = DECODER | layer(
    ffn_up="mlp.gate_up_proj", post_attention_norm="post_self_attn_layernorm", post_ffw_norm="post_mlp_layernorm"
)
WRITES = ("glm4",)


def config(m: Metadata) -> dict[str, Any]:
    return common(m) | {"model_type": "glm4", "attention_bias": m.tensor("blk.0.attn_q.bias") is not None}


def keys(raw: dict[str, Any]) -> dict[str, Any]:
    rope = raw.get("rope_parameters") or {}
    return {"rope.dimension_count": int(head_dim(raw) * rope.get("partial_rotary_factor", 0.5))}
