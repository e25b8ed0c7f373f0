"""Hunyuan, dense. Files have the base of its rope stretched."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import DECODER, QK_NORM
from ._common import config as common

TENSORS = DECODER | QK_NORM
NAME = "hunyuan-dense"


def config(m: Metadata) -> dict[str, Any]:
    biased = m.tensor("blk.0.attn_q.bias") is not None
    return common(m) | {"model_type": "hunyuan_v1_dense", "attention_bias": biased}
