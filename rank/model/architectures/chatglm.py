"""ChatGLM2, ChatGLM3 and GLM-4 9B as published with code of their own (GLM team 2024, arXiv 2406.12793).

Llama with few key heads, biases on queries, keys and values, and half of each head rotated, interleaved.
Checkpoints hold queries, keys and values, and gate and up, whole. `rope_ratio` is a factor on the base of the rotary
frequencies; ChatGLM2-6B-32K alone divides positions by it (Chen et al. 2023, arXiv 2306.15595).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .. import base
from ..layers.rope import Parameters
from . import llama

CONFIG = {
    "names": {
        "num_layers": "num_hidden_layers",
        "ffn_hidden_size": "intermediate_size",
        "kv_channels": "head_dim",
        "padded_vocab_size": "vocab_size",
        "seq_length": "max_position_embeddings",
        "layernorm_epsilon": "rms_norm_eps",
        "multi_query_group_num": "num_key_value_heads",
        "add_bias_linear": "mlp_bias",
    },
    "defaults": {"intermediate_size": 13696},
}

# Values required of keys that other models of this type could set otherwise.
EXPECTED = {
    "position_encoding_2d": False,  # ChatGLM-6B, the first, which has another architecture
    "rmsnorm": True,
    "post_layer_norm": True,
    "apply_residual_connection_post_layernorm": False,
    "multi_query_attention": True,
    "quantization_bit": 0,
    "pre_seq_len": 0,
}


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    rms_norm_eps: float = 1e-5
    add_qkv_bias: bool = False
    rope_ratio: float = 1.0
    original_rope: bool = True
    position_encoding_2d: bool = False
    rmsnorm: bool = True
    post_layer_norm: bool = True
    apply_residual_connection_post_layernorm: bool = False
    multi_query_attention: bool = False
    quantization_bit: int = 0
    pre_seq_len: int = 0
    _name_or_path: str = ""

    def __post_init__(self) -> None:
        for key, expected in EXPECTED.items():
            base.expect(key, getattr(self, key), expected)
        base.expect("rope type", self.rope_parameters["rope_type"], "default")  # rope_ratio says what there is

    @property
    def qkv_bias(self) -> bool:
        return self.add_qkv_bias or self.mlp_bias

    @property
    def o_bias(self) -> bool:
        return self.mlp_bias

    def rope(self, index: int) -> Parameters:
        half = {"partial_rotary_factor": 0.5, "interleaved": self.original_rope}
        if "chatglm2" in self._name_or_path.lower():
            return {"rope_type": "linear", "rope_theta": 10000.0, "factor": self.rope_ratio, **half}
        return {"rope_type": "default", "rope_theta": 10000.0 * self.rope_ratio, **half}


class Model(llama.Model):
    MERGED: ClassVar[dict[str, tuple[str, ...]]] = {}
    RENAMED = {
        "transformer.embedding.word_embeddings.": "model.embed_tokens.",
        "transformer.encoder.final_layernorm.": "model.norm.",
        "transformer.encoder.layers.": "model.layers.",
        "transformer.output_layer.": "lm_head.",
        ".self_attention.query_key_value.": ".self_attn.qkv_proj.",
        ".self_attention.dense.": ".self_attn.o_proj.",
        ".mlp.dense_h_to_4h.": ".mlp.gate_up_proj.",
        ".mlp.dense_4h_to_h.": ".mlp.down_proj.",
    }
