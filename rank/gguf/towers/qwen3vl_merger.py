"""The tower of Qwen3-VL and Qwen3.5."""

from __future__ import annotations

from typing import Any

from ....errors import MODEL, FatalError
from ..metadata import Metadata
from . import _qwen, size

MODELS = {
    "qwen3": "qwen3_vl",
    "qwen3_moe": "qwen3_vl_moe",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
}
TOKENS = _qwen.TOKENS
# Mergers of layers that are handed on stand under the layer's number in files, and by their order in the tower.
DEEPER = {
    "norm": "vision.deepstack_merger_list.{}.norm",
    "fc1": "vision.deepstack_merger_list.{}.linear_fc1",
    "fc2": "vision.deepstack_merger_list.{}.linear_fc2",
}
TENSORS = _qwen.TENSORS | {
    "v.position_embd": "vision.pos_embed",
    "v.post_ln": "vision.merger.norm",
    "mm.0": "vision.merger.linear_fc1",
    "mm.2": "vision.merger.linear_fc2",
    "v.blk.{}.ffn_up": "vision.blocks.{}.mlp.linear_fc1",
    "v.blk.{}.ffn_down": "vision.blocks.{}.mlp.linear_fc2",
}


def config(m: Metadata) -> dict[str, Any]:
    found = _qwen.config(m)
    vision = found["vision_config"]
    vision["intermediate_size"] = size(m, "feed_forward_length")
    vision["num_position_embeddings"] = (size(m, "image_size") // vision["patch_size"]) ** 2
    handed_on = m.values.get("clip.vision.is_deepstack_layers") or []
    if not isinstance(handed_on, list) or len(handed_on) > vision["depth"]:
        raise FatalError(
            f"{m.file}: the metadata's clip.vision.is_deepstack_layers is no list of at most {vision['depth']} layers",
            MODEL,
        )
    vision["deepstack_visual_indexes"] = [i for i, one in enumerate(handed_on) if one]
    return found


def tensors(m: Metadata) -> dict[str, str]:
    layers = config(m)["vision_config"]["deepstack_visual_indexes"]
    return TENSORS | {
        f"v.deepstack.{layer}.{theirs}": ours.format(i)
        for i, layer in enumerate(layers)
        for theirs, ours in DEEPER.items()
    }
