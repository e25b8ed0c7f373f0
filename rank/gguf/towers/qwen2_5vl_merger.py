"""Qwen2.5-VL's tower."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from . import _qwen, size

MODELS = {"qwen2": "qwen2_5_vl"}
TOKENS = _qwen.TOKENS
TENSORS = _qwen.TENSORS | {
    "v.post_ln": "vision.merger.ln_q",
    "mm.{}": "vision.merger.mlp.{}",
    "v.blk.{}.ffn_gate": "vision.blocks.{}.mlp.gate_proj",
    "v.blk.{}.ffn_up": "vision.blocks.{}.mlp.up_proj",
    "v.blk.{}.ffn_down": "vision.blocks.{}.mlp.down_proj",
}


def config(m: Metadata) -> dict[str, Any]:
    found = _qwen.config(m)
    vision, every = found["vision_config"], m.integer("vision.n_wa_pattern", 0)
    vision["intermediate_size"] = size(m, "feed_forward_length")
    vision["window_size"] = size(m, "window_size", 112)
    # Each `every`-th layer attends to the whole image.
    vision["fullatt_block_indexes"] = [i for i in range(vision["depth"]) if not every or (i + 1) % every == 0]
    return found | {"image_processor": _qwen.PUBLISHED | found["image_processor"]}
