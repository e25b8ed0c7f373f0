"""OLMo 1: norms have no weights."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import DECODER
from ._common import config as common

TENSORS = DECODER
PAIRED = ("attn_q", "attn_k")


def config(m: Metadata) -> dict[str, Any]:
    return common(m) | {"model_type": "olmo"} | m.given(clip_qkv="attention.clamp_kqv")
