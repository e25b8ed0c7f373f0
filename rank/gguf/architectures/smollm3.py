"""SmolLM3. Files do not say which layers rotate nothing: every fourth, as in the models there are."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import DECODER
from ._common import config as common

TENSORS = DECODER
PAIRED = ("attn_q", "attn_k")


def config(m: Metadata) -> dict[str, Any]:
    biased = m.tensor("blk.0.attn_q.bias") is not None
    return common(m) | {"model_type": "smollm3", "attention_bias": biased, "use_sliding_window": False}
