"""Seed-OSS."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import DECODER, layer
from ._common import config as common

TENSORS = DECODER | layer(post_attention_norm="post_attention_layernorm")
WRITES = ("seed_oss",)


def config(m: Metadata) -> dict[str, Any]:
    biases = {
        "attention_bias": m.tensor("blk.0.attn_q.bias") is not None,
        "attention_out_bias": m.tensor("blk.0.attn_output.bias") is not None,
        "mlp_bias": m.tensor("blk.0.ffn_up.bias") is not None,
    }
    return common(m) | {"model_type": "seed_oss"} | biases
