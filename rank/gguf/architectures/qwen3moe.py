"""Qwen3 with experts."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import DECODER, EXPERTS, QK_NORM, expert_keys, experts
from ._common import config as common

TENSORS = DECODER | QK_NORM | EXPERTS
WRITES = ("qwen3_moe",)


def config(m: Metadata) -> dict[str, Any]:
    return common(m) | experts(m) | {"model_type": "qwen3_moe", "norm_topk_prob": True}


def keys(raw: dict[str, Any]) -> dict[str, Any]:
    return expert_keys(raw)
