"""Qwen3.5 (Qwen team 2026): Qwen2.5-VL's way with larger patches and other colours."""

from __future__ import annotations

from typing import Any

from . import qwen2_5_vl

DEFAULTS = {
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "size": {"shortest_edge": 1 << 16, "longest_edge": 1 << 24},
}


def read(config: dict[str, Any], processor: dict[str, Any]) -> qwen2_5_vl.Rules:
    vision = {"patch_size": 16} | config["vision_config"]
    return qwen2_5_vl.read({"image_token_id": 248056} | config | {"vision_config": vision}, DEFAULTS | processor)
