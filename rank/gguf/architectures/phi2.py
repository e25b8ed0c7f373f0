"""Phi-1, Phi-1.5 and Phi-2."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import DECODER, layer
from ._common import config as common

TENSORS = DECODER | layer(
    attn_qkv="self_attn.qkv_proj", attn_output="self_attn.dense", ffn_up="mlp.fc1", ffn_down="mlp.fc2"
)
WRITES = ("phi",)


def config(m: Metadata) -> dict[str, Any]:
    return common(m) | {"model_type": "phi"}
