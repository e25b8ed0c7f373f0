"""Qwen3.5, dense, text."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from . import _delta_net
from ._common import layer

TENSORS = _delta_net.TENSORS | layer(ssm_beta="linear_attn.in_proj_b", ssm_alpha="linear_attn.in_proj_a")
ENDINGS, ADDED, UNCHANGED = _delta_net.ENDINGS, _delta_net.ADDED, _delta_net.UNCHANGED
LOGARITHMS, ONES = _delta_net.LOGARITHMS, _delta_net.ONES
orders = _delta_net.tiled
WRITES = "qwen3_5", "qwen3_5_text"


def config(m: Metadata) -> dict[str, Any]:
    return _delta_net.config(m) | {"model_type": "qwen3_5_text"}


def keys(raw: dict[str, Any]) -> dict[str, Any]:
    return _delta_net.keys(raw) | _delta_net.section_keys(raw)
