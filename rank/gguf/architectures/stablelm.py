"""StableLM."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import DECODER, layer
from ._common import config as common

TENSORS = DECODER | layer(attn_q_norm="self_attn.q_layernorm", attn_k_norm="self_attn.k_layernorm")
STACKED = {"attn_q_norm": "norms", "attn_k_norm": "norms"}
WRITES = ("stablelm",)


def config(m: Metadata) -> dict[str, Any]:
    return common(m) | {
        "model_type": "stablelm",
        "use_qkv_bias": m.tensor("blk.0.attn_q.bias") is not None,
        "use_parallel_residual": m.flag("use_parallel_residual", False),
        "qk_layernorm": m.tensor("blk.0.attn_q_norm.weight") is not None,
    }


def keys(raw: dict[str, Any]) -> dict[str, Any]:
    return {"use_parallel_residual": bool(raw["use_parallel_residual"])}
