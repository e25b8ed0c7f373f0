"""Llama, Mistral and Mixtral: files do not tell the first two apart, as they compute alike."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import DECODER, EXPERTS, expert_keys
from ._common import config as common

TENSORS = DECODER | EXPERTS
PAIRED = ("attn_q", "attn_k")
WRITES = "llama", "mistral", "mixtral", "ministral"


def config(m: Metadata) -> dict[str, Any]:
    biased = m.tensor("blk.0.attn_q.bias") is not None
    keys = common(m) | {"attention_bias": biased}
    if not m.integer("expert_count", 0):
        return keys | {"model_type": "llama"}
    experts = {"num_local_experts": m.integer("expert_count"), "num_experts_per_tok": m.integer("expert_used_count")}
    return keys | experts | {"model_type": "mixtral"}


def keys(raw: dict[str, Any]) -> dict[str, Any]:
    return expert_keys(raw) if raw["model_type"] == "mixtral" else {}
