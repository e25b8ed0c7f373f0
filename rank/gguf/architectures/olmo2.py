"""OLMo 2."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import DECODER, QK_NORM, layer
from ._common import config as common

TENSORS = (
    DECODER
    | QK_NORM
    | layer(post_attention_norm="post_attention_layernorm", post_ffw_norm="post_feedforward_layernorm")
)
WRITES = ("olmo2",)


def config(m: Metadata) -> dict[str, Any]:
    return common(m) | {"model_type": "olmo2"}
