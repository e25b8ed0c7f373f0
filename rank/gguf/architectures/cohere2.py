"""Command R7B and Command A. Files do not name the layers with a window: three of four."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import DECODER
from ._common import config as common

TENSORS = DECODER
WRITES = ("cohere2",)


def config(m: Metadata) -> dict[str, Any]:
    return common(m) | {
        "model_type": "cohere2",
        "logit_scale": m.number("logit_scale"),
        "sliding_window": m.integer("attention.sliding_window"),
        "attention_bias": m.tensor("blk.0.attn_q.bias") is not None,
    }


def keys(raw: dict[str, Any]) -> dict[str, Any]:
    return {"logit_scale": float(raw["logit_scale"]), "attention.sliding_window": raw["sliding_window"]}
