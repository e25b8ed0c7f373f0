"""OLMoE."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import DECODER, EXPERTS, QK_NORM, expert_keys
from ._common import config as common

TENSORS = DECODER | QK_NORM | EXPERTS
WRITES = ("olmoe",)


def config(m: Metadata) -> dict[str, Any]:
    return common(m) | {
        "model_type": "olmoe",
        "num_experts": m.integer("expert_count"),
        "num_experts_per_tok": m.integer("expert_used_count"),
    }


def keys(raw: dict[str, Any]) -> dict[str, Any]:
    return expert_keys(raw)
