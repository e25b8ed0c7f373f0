"""Phi-3, Phi-3.5 and Phi-4."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import DECODER, layer
from ._common import config as common

TENSORS = DECODER | layer(attn_qkv="self_attn.qkv_proj", ffn_up="mlp.gate_up_proj")
WRITES = ("phi3",)


def config(m: Metadata) -> dict[str, Any]:
    return common(m) | {"model_type": "phi3", "sliding_window": m.integer("attention.sliding_window", 0) or None}


def keys(raw: dict[str, Any]) -> dict[str, Any]:
    return {"attention.sliding_window": raw.get("sliding_window") or 0}
