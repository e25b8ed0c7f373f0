"""Gemma 2. The files do not have query_pre_attn_scalar, in which one size differs from the others."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import DECODER, FOUR_NORMS
from ._common import config as common

TENSORS = DECODER | FOUR_NORMS
ADDED = 1.0
LARGEST = 46  # layers: of the 27B, where it is not the size of a head
WRITES = ("gemma2",)


def config(m: Metadata) -> dict[str, Any]:
    keys = common(m)
    whole = keys["num_hidden_layers"] == LARGEST
    scalar = keys["hidden_size"] / keys["num_attention_heads"] if whole else keys["head_dim"]
    return keys | {
        "model_type": "gemma2",
        "query_pre_attn_scalar": scalar,
        "sliding_window": m.integer("attention.sliding_window"),
        "attn_logit_softcapping": m.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": m.number("final_logit_softcapping", 30.0),
    }


def keys(raw: dict[str, Any]) -> dict[str, Any]:
    names = "sliding_window", "attn_logit_softcapping", "final_logit_softcapping"
    found = {name: raw[name] for name in names if raw.get(name) is not None}
    window = {"attention.sliding_window": found.pop("sliding_window")} if "sliding_window" in found else {}
    return window | {name: float(value) for name, value in found.items()}
