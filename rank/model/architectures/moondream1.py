"""Moondream 2 (vikhyatk/moondream2, revisions of 2025): Phi's layers behind an image, captions and answers to
questions about it.

config.json has only those of its sizes that differ. The model that points and detects objects is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .. import base
from ..vision import moondream1
from . import phi

CONFIG = {
    "names": {
        "config.text.dim": "hidden_size",
        "config.text.ff_dim": "intermediate_size",
        "config.text.n_layers": "num_hidden_layers",
        "config.text.n_heads": "num_attention_heads",
        "config.text.n_kv_heads": "num_key_value_heads",
        "config.text.vocab_size": "vocab_size",
        "config.text.max_context": "max_position_embeddings",
        "config.text.group_size": "group_size",
        "config.vision": "vision_config",
    },
    "defaults": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32,
        "vocab_size": 51200, "partial_rotary_factor": 0.5, "vision_config": {},
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Args(base.SeeingArgs, phi.Args):
    vision_config: dict[str, Any] = field(default_factory=dict)
    group_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        base.expect("config.text.group_size", self.group_size, None)  # of the revisions in 4 bits


class Model(base.SeeingModel, phi.Model):
    PREFIXES = {"model.text.": "model.", "text.": "model.", "model.vision.": "vision."}
    LEFT_OUT = "region.", "model.region."
    MERGED = phi.Model.MERGED | {
        "o_proj": ("proj",), "out_proj": ("proj",), "layer_norm1": ("ln1",), "layer_norm2": ("ln2",),
    }  # fmt: skip
    RENAMED = {
        "model.wte": "model.embed_tokens.weight",
        "model.blocks.": "model.layers.",
        "model.post_ln.": "model.norm.",
        "model.lm_head.": "lm_head.",
        "vision.pos_emb": "vision.pos_emb.weight",
        ".ln.": ".input_layernorm.",
        ".attn.": ".self_attn.",
        ".qkv.": ".qkv_proj.",
    }
    TOWER = moondream1.Tower
