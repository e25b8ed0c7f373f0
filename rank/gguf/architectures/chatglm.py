"""ChatGLM2, ChatGLM3 and GLM-4 9B, the latter as transformers has it, too: queries, keys and values whole or apart.

A factor on the base of the rotary frequencies (`rope_ratio`) is part of the base in files.
"""

from __future__ import annotations

from typing import Any

from ....errors import MODEL, FatalError
from ..metadata import Metadata
from ._common import config as common
from ._common import head_dim
from .phi3 import TENSORS as TENSORS

WRITES = "glm", "chatglm"
# chatglm's keys in glm's words: biases, the base of the rope, and what is the same in all that are supported.
SPELLED_ANEW = (
    "add_qkv_bias", "rope_ratio", "original_rope", "rmsnorm", "post_layer_norm", "multi_query_attention",
    "_name_or_path",
)  # fmt: skip


def config(m: Metadata) -> dict[str, Any]:
    biased = any(m.tensor(f"blk.0.{part}.bias") for part in ("attn_qkv", "attn_q"))
    return common(m) | {"model_type": "glm", "attention_bias": biased}


def keys(raw: dict[str, Any]) -> dict[str, Any]:
    if raw["model_type"] == "chatglm":
        return _published(raw)
    rope = raw.get("rope_parameters") or {}
    return {"rope.dimension_count": int(head_dim(raw) * rope.get("partial_rotary_factor", 0.5))}


def _published(raw: dict[str, Any]) -> dict[str, Any]:
    """Keys of config.json as it is published with code of its own."""
    for key, expected in (("original_rope", True), ("mlp_bias", False)):
        if raw[key] != expected:
            raise FatalError(f"GGUF files of chatglm cannot say that {key} is {raw[key]}", MODEL)
    ratio, dim = float(raw["rope_ratio"]), {"rope.dimension_count": head_dim(raw) // 2}
    if "chatglm2" in raw["_name_or_path"].lower():
        return dim | {"rope.scaling.type": "linear", "rope.scaling.factor": ratio}
    return dim | {"rope.freq_base": 10000.0 * ratio}
