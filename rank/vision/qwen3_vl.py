"""Qwen3-VL (Qwen team 2025, arXiv 2511.21631), as Qwen3.5."""

from __future__ import annotations

from typing import Any

from . import qwen2_5_vl, qwen3_5


def read(config: dict[str, Any], processor: dict[str, Any]) -> qwen2_5_vl.Rules:
    return qwen3_5.read({"image_token_id": 151655} | config, processor)
