"""Mistral Small 3.1 and Ministral 3, text. The latter raises queries beyond the original context."""

from __future__ import annotations

from typing import Any

from ....errors import MODEL, FatalError
from ..metadata import Metadata
from ._common import DECODER
from ._common import config as common

TENSORS = DECODER
PAIRED = ("attn_q", "attn_k")
WRITES = "ministral3", "mistral3"


def config(m: Metadata) -> dict[str, Any]:
    if m.integer("expert_count", 0):
        raise FatalError(f"{m.file}: mistral3 models with experts are not supported", MODEL)
    keys = common(m)
    rope = keys["rope_parameters"]
    if m.has("rope.scaling.yarn_log_multiplier"):
        rope |= {"mscale": 1.0, "mscale_all_dim": m.number("rope.scaling.yarn_log_multiplier")}
    if not m.has("attention.temperature_scale"):
        return keys | {"model_type": "mistral", "sliding_window": None}  # a config without that key means 4096
    rope["llama_4_scaling_beta"] = m.number("attention.temperature_scale")
    rope.setdefault("original_max_position_embeddings", m.integer("context_length"))
    return keys | {"model_type": "ministral3"}


def keys(raw: dict[str, Any]) -> dict[str, Any]:
    rope = raw["rope_parameters"]
    named = {
        "rope.scaling.yarn_log_multiplier": rope.get("mscale_all_dim"),
        "attention.temperature_scale": rope.get("llama_4_scaling_beta"),
    }
    return {key: float(value) for key, value in named.items() if value}
