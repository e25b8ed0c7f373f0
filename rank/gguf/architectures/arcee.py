"""Arcee's AFM."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import DECODER
from ._common import config as common

TENSORS = DECODER
PAIRED = ("attn_q", "attn_k")
WRITES = ("arcee",)


def config(m: Metadata) -> dict[str, Any]:
    biases = {
        "attention_bias": m.tensor("blk.0.attn_q.bias") is not None,
        "mlp_bias": m.tensor("blk.0.ffn_up.bias") is not None,
    }
    return common(m) | {"model_type": "arcee"} | biases
