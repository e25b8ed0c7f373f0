"""Entries that Qwen's towers share."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from . import common, layers, size

TOKENS = {"image_token_id": "<|image_pad|>"}
PUBLISHED = {"min_pixels": 4 * 28 * 28, "max_pixels": 16384 * 28 * 28}  # of Qwen2-VL and Qwen2.5-VL: files have none
TENSORS = {
    "v.patch_embd": "vision.patch_embed.proj",
    "v.patch_embd.weight.1": "vision.patch_embed.proj.second",  # of the second frame, which is the same image
    "v.blk.{}.ln1": "vision.blocks.{}.norm1",
    "v.blk.{}.ln2": "vision.blocks.{}.norm2",
    "v.blk.{}.attn_qkv": "vision.blocks.{}.attn.qkv",
    "v.blk.{}.attn_q": "vision.blocks.{}.attn.q",
    "v.blk.{}.attn_k": "vision.blocks.{}.attn.k",
    "v.blk.{}.attn_v": "vision.blocks.{}.attn.v",
    "v.blk.{}.attn_out": "vision.blocks.{}.attn.proj",
}


def config(m: Metadata) -> dict[str, Any]:
    return common(m) | {
        "vision_config": {
            "hidden_size": size(m, "embedding_length"),
            "depth": layers(m),
            "num_heads": size(m, "attention.head_count"),
            "patch_size": size(m, "patch_size"),
            "spatial_merge_size": size(m, "spatial_merge_size", 2),
            "temporal_patch_size": 1,
            "second_frame": True,
        }
    }
