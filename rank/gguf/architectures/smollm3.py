"""SmolLM3. Files do not name the layers without rope: every fourth, as in the models there are."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import DECODER
from ._common import config as common

TENSORS = DECODER
PAIRED = ("attn_q", "attn_k")
WRITES = ("smollm3",)


def config(m: Metadata) -> dict[str, Any]:
    keys = common(m)
    return keys | {
        "model_type": "smollm3",
        "attention_bias": m.tensor("blk.0.attn_q.bias") is not None,
        "use_sliding_window": False,
        "no_rope_layers": [int((i + 1) % 4 > 0) for i in range(keys["num_hidden_layers"])],  # 1: it rotates
    }
