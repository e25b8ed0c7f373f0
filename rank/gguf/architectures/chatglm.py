"""ChatGLM2, ChatGLM3 and GLM-4 9B, the latter as transformers has it, too: queries, keys and values whole or apart.

A factor on the base of the rotary frequencies (`rope_ratio`) is part of the base in files.
"""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import DECODER, head_dim, layer
from ._common import config as common

TENSORS = DECODER | layer(attn_qkv="self_attn.qkv_proj", ffn_up="mlp.gate_up_proj")
WRITES = ("glm",)


def config(m: Metadata) -> dict[str, Any]:
    biased = any(m.tensor(f"blk.0.{part}.bias") for part in ("attn_qkv", "attn_q"))
    return common(m) | {"model_type": "glm", "attention_bias": biased}


def keys(raw: dict[str, Any]) -> dict[str, Any]:
    rope = raw.get("rope_parameters") or {}
    return {"rope.dimension_count": int(head_dim(raw) * rope.get("partial_rotary_factor", 0.5))}
