"""OLMo 2, and OLMo 3: that has windows, of all layers but every fourth, whose rope alone is scaled."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import DECODER, QK_NORM, layer
from ._common import config as common

TENSORS = (
    DECODER
    | QK_NORM
    | layer(post_attention_norm="post_attention_layernorm", post_ffw_norm="post_feedforward_layernorm")
)
WRITES = ("olmo2", "olmo3")


def config(m: Metadata) -> dict[str, Any]:
    keys = common(m)
    if not (window := m.integer("attention.sliding_window", 0)):
        return keys | {"model_type": "olmo2"}
    rope = keys["rope_parameters"]
    plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    ropes = {"full_attention": {"rope_type": "default"} | rope, "sliding_attention": plain}
    return keys | {"model_type": "olmo3", "sliding_window": window, "rope_parameters": ropes}


def keys(raw: dict[str, Any]) -> dict[str, Any]:
    return {"attention.sliding_window": raw["sliding_window"]} if raw.get("sliding_window") else {}
