"""SantaCoder and StarCoder."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import DECODER, layer
from ._common import config as common

TENSORS = (
    DECODER
    | layer(attn_qkv="self_attn.qkv_proj", attn_output="self_attn.c_proj", ffn_up="mlp.c_fc", ffn_down="mlp.c_proj")
    | {"position_embd": "model.embed_positions"}
)
WRITES = ("gpt_bigcode",)


def config(m: Metadata) -> dict[str, Any]:
    keys = common(m)
    return keys | {"model_type": "gpt_bigcode", "n_inner": keys["intermediate_size"], "num_key_value_heads": 1}


def keys(raw: dict[str, Any]) -> dict[str, Any]:
    return {
        "feed_forward_length": raw.get("n_inner") or 4 * raw["hidden_size"],
        "attention.head_count_kv": 1,
    }
