"""Gemma 3's tower."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from . import common, layers, size

MODELS = {"gemma3_text": "gemma3"}
TOKENS = {"image_token_index": "<image_soft_token>"}
ADDED = 1.0
LAYER = {
    "ln1": "layer_norm1", "ln2": "layer_norm2", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_out": "self_attn.out_proj", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2",
}  # fmt: skip
LEGACY = {"ffn_up": "mlp.fc2", "ffn_down": "mlp.fc1"}  # in files of early 2025
TENSORS = {
    "v.patch_embd": "vision.tower.embeddings.patch_embedding",
    "v.position_embd": "vision.tower.embeddings.position_embedding",
    "v.post_ln": "vision.tower.post_layernorm",
    "mm.input_projection.weight": "vision.projector.mm_input_projection_weight",
    "mm.soft_emb_norm": "vision.projector.mm_soft_emb_norm",
}


def config(m: Metadata) -> dict[str, Any]:
    image, patch = size(m, "image_size"), size(m, "patch_size")
    vision = {
        "model_type": "siglip_vision_model", "image_size": image, "patch_size": patch,
        "hidden_size": size(m, "embedding_length"),
        "intermediate_size": size(m, "feed_forward_length"),
        "num_hidden_layers": layers(m),
        "num_attention_heads": size(m, "attention.head_count"),
        "layer_norm_eps": m.number("vision.attention.layer_norm_epsilon", 1e-6),
    }  # fmt: skip
    averaged = size(m, "projector.scale_factor", 4)  # patches of a token along an edge
    side = image // (patch * averaged)
    return common(m) | {"vision_config": vision, "mm_tokens_per_image": side**2}


def tensors(m: Metadata) -> dict[str, str]:
    up = m.tensor("v.blk.0.ffn_up.weight")
    swapped = up is not None and up.shape[-1] == size(m, "feed_forward_length") != up.shape[0]
    layer = LAYER | (LEGACY if swapped else {})
    return TENSORS | {
        f"v.blk.{{}}.{theirs}": f"vision.tower.encoder.layers.{{}}.{ours}" for theirs, ours in layer.items()
    }
