"""Nemotron-4 and Minitron."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import DECODER
from ._common import config as common

TENSORS = DECODER
ADDED = 1.0
WRITES = ("nemotron",)


def config(m: Metadata) -> dict[str, Any]:
    return common(m) | {
        "model_type": "nemotron",
        "attention_bias": m.tensor("blk.0.attn_q.bias") is not None,
        "mlp_bias": m.tensor("blk.0.ffn_up.bias") is not None,
    }
