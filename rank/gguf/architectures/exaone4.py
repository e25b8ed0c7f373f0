"""EXAONE 4: every fourth layer attends to all, where files have a window at all."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from . import olmo2
from ._common import DECODER, QK_NORM, layer
from ._common import config as common

TENSORS = (
    DECODER
    | QK_NORM
    | layer(post_attention_norm="post_attention_layernorm", post_ffw_norm="post_feedforward_layernorm")
)
WRITES = ("exaone4",)


def config(m: Metadata) -> dict[str, Any]:
    keys, window = common(m) | {"model_type": "exaone4"}, m.integer("attention.sliding_window", 0)
    types = olmo2.layer_types(m, keys["num_hidden_layers"]) if window else ["full_attention"] * m.integer("block_count")
    return keys | {"sliding_window": window or None, "layer_types": types}


def keys(raw: dict[str, Any]) -> dict[str, Any]:
    if not raw.get("sliding_window"):
        return {}
    return {"attention.sliding_window": raw["sliding_window"], olmo2.PATTERN: olmo2.period(raw["layer_types"])}
