"""Granite 3 with experts."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from . import granite
from ._common import EXPERTS, expert_keys

TENSORS = granite.TENSORS | EXPERTS
PAIRED = granite.PAIRED
WRITES = ("granitemoe",)


def config(m: Metadata) -> dict[str, Any]:
    return granite.config(m) | {
        "model_type": "granitemoe",
        "num_local_experts": m.integer("expert_count"),
        "num_experts_per_tok": m.integer("expert_used_count"),
    }


def keys(raw: dict[str, Any]) -> dict[str, Any]:
    return granite.keys(raw) | expert_keys(raw)
