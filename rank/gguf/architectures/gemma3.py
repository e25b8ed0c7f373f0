"""Gemma 3, text. Files do not have query_pre_attn_scalar, in which one size differs from the others."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import DECODER, FOUR_NORMS, QK_NORM
from ._common import config as common

TENSORS = DECODER | FOUR_NORMS | QK_NORM
ADDED = 1.0
LARGEST = 62  # layers: of the 27B, where it is not the size of a head
WRITES = "gemma3", "gemma3_text"


def config(m: Metadata) -> dict[str, Any]:
    keys = common(m)
    whole = keys["num_hidden_layers"] == LARGEST
    scalar = keys["hidden_size"] / keys["num_attention_heads"] if whole else keys["head_dim"]
    return (
        keys
        | {
            "model_type": "gemma3_text",
            "query_pre_attn_scalar": scalar,
            "sliding_window": m.integer("attention.sliding_window"),
            "rope_local_base_freq": m.number("rope.freq_base_swa", 10000.0),
        }
        | m.given(final_logit_softcapping="final_logit_softcapping")
    )


def keys(raw: dict[str, Any]) -> dict[str, Any]:
    rope = raw.get("rope_parameters") or {}
    local = rope.get("sliding_attention", {}).get("rope_theta", raw.get("rope_local_base_freq", 10000.0))
    capped = raw.get("final_logit_softcapping")
    return {"attention.sliding_window": raw["sliding_window"], "rope.freq_base_swa": float(local)} | (
        {"final_logit_softcapping": float(capped)} if capped else {}
    )
