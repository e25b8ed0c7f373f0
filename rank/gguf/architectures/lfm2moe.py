"""LFM2 with experts."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from . import lfm2
from ._common import CORRECTION, EXPERTS, experts, layer

TENSORS = lfm2.TENSORS | EXPERTS | layer(exp_probs_b="mlp.gate")
ENDINGS, ONES = CORRECTION, lfm2.ONES


def config(m: Metadata) -> dict[str, Any]:
    keys = lfm2.config(m) | experts(m)
    dense = m.integer("leading_dense_block_count", 0)
    del keys["block_auto_adjust_ff_dim"]
    return keys | {
        "model_type": "lfm2_moe",
        "num_dense_layers": dense,
        "use_expert_bias": m.tensor(f"blk.{dense}.exp_probs_b.bias") is not None,
    }
