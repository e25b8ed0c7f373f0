"""Command R and R+, Aya 23."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import DECODER, QK_NORM
from ._common import config as common

TENSORS = DECODER | QK_NORM
NAME = "command-r"


def config(m: Metadata) -> dict[str, Any]:
    return common(m) | {
        "model_type": "cohere",
        "logit_scale": m.number("logit_scale"),
        "use_qk_norm": m.tensor("blk.0.attn_q_norm.weight") is not None,
        "attention_bias": m.tensor("blk.0.attn_q.bias") is not None,
    }
