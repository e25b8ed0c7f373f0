"""Pixtral's tower, which Mistral Small 3.1 and 4 and Ministral 3 have."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from . import common, layers, size

MODELS = dict.fromkeys(("mistral", "ministral3", "mistral4", "llama"), "mistral3")
TOKENS = {"image_token_id": "[IMG]", "image_break_token_id": "[IMG_BREAK]", "image_end_token_id": "[IMG_END]"}
PAIRED = "attn_q", "attn_k"
LAYER = {
    "ln1": "attention_norm", "ln2": "ffn_norm", "attn_q": "attention.q_proj", "attn_k": "attention.k_proj",
    "attn_v": "attention.v_proj", "attn_out": "attention.o_proj", "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj", "ffn_down": "feed_forward.down_proj",
}  # fmt: skip
TENSORS = {f"v.blk.{{}}.{theirs}": f"vision.tower.transformer.layers.{{}}.{ours}" for theirs, ours in LAYER.items()} | {
    "v.patch_embd": "vision.tower.patch_conv",
    "v.pre_ln": "vision.tower.ln_pre",
    "mm.input_norm": "vision.projector.norm",
    "mm.patch_merger": "vision.projector.patch_merger.merging_layer",
    "mm.1": "vision.projector.linear_1",
    "mm.2": "vision.projector.linear_2",
    "v.token_embd.img_break": "",  # a row of the embedding
}


def config(m: Metadata) -> dict[str, Any]:
    found = common(m)
    hidden, heads = size(m, "embedding_length"), size(m, "attention.head_count")
    activation = "gelu" if m.values.get("clip.use_gelu") else "silu"
    vision = {
        "hidden_size": hidden, "num_attention_heads": heads, "head_dim": hidden // heads,
        "num_hidden_layers": layers(m), "patch_size": size(m, "patch_size"),
        "intermediate_size": size(m, "feed_forward_length"), "hidden_act": activation,
        "rope_theta": m.number("rope.freq_base", 10000.0),
    }  # fmt: skip
    return {
        "vision_config": vision,
        "spatial_merge_size": size(m, "spatial_merge_size", 1),
        "image_processor": found["image_processor"] | {"size": {"longest_edge": size(m, "image_size", 1540)}},
        "multimodal_projector_bias": m.tensor("mm.1.bias") is not None,
    }
