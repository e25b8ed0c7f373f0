"""Granite 3, dense."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import DECODER
from ._common import config as common

TENSORS = DECODER
PAIRED = ("attn_q", "attn_k")
SCALES = {
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
WRITES = ("granite",)


def config(m: Metadata) -> dict[str, Any]:
    return common(m) | {"model_type": "granite"} | m.given(**SCALES)


def keys(raw: dict[str, Any]) -> dict[str, Any]:
    return {theirs: float(raw[ours]) for ours, theirs in SCALES.items() if raw.get(ours) is not None}
