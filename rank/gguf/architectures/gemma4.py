"""Gemma 4, text. Which layers have a window, files say; which take keys for values, the tensors tell."""

from __future__ import annotations

import math
from typing import Any

from ....errors import MODEL, FatalError
from ..metadata import Metadata
from ._common import DECODER, FOUR_NORMS, QK_NORM, layer
from ._common import config as common

TENSORS = (
    DECODER
    | FOUR_NORMS
    | QK_NORM
    | {
        "per_layer_token_embd": "model.inputs.embed_tokens_per_layer",
        "per_layer_model_proj": "model.inputs.per_layer_model_projection",
        "per_layer_proj_norm": "model.inputs.per_layer_projection_norm",
        "blk.{}.layer_output_scale.weight": "model.layers.{}.scalar.layer_scalar",
        "blk.{}.ffn_gate_inp.scale": "model.layers.{}.routed.norm.weight",
        "blk.{}.ffn_down_exps.scale": "model.layers.{}.routed.scale.per_expert_scale",
    }
    | layer(
        ffn_gate_inp="routed.proj",
        ffn_gate_up_exps="routed.experts.gate_up_proj",
        ffn_gate_exps="routed.experts.gate_proj",
        ffn_up_exps="routed.experts.up_proj",
        ffn_down_exps="routed.experts.down_proj",
        pre_ffw_norm_2="routed.before",
        post_ffw_norm_1="after_mlp",
        post_ffw_norm_2="routed.after",
        inp_gate="input.per_layer_input_gate",
        proj="input.per_layer_projection",
        post_norm="input.post_per_layer_input_norm",
    )
)
NOT_ROTATED = 1e30  # what divides a frequency so that nothing rotates
EXPERTS = {
    "num_experts": "expert_count",
    "top_k_experts": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}


def config(m: Metadata) -> dict[str, Any]:
    slides = m.of_layers("attention.sliding_window_pattern", bool)
    heads = m.of_layers("attention.head_count_kv", int, m.integer("attention.head_count"))
    inner = m.of_layers("feed_forward_length", int)
    sliding, full = slides.index(True) if True in slides else 0, slides.index(False) if False in slides else 0
    keys = common(m, num_key_value_heads=heads[sliding], intermediate_size=inner[0])
    head_dim, whole = m.integer("attention.key_length_swa"), keys["head_dim"]
    table, experts = m.tensor("per_layer_token_embd.weight"), m.integer("expert_count", 0)
    return (
        keys
        | {
            "model_type": "gemma4_text",
            "layer_types": ["sliding_attention" if one else "full_attention" for one in slides],
            "sliding_window": m.integer("attention.sliding_window"),
            "head_dim": head_dim,
            "global_head_dim": whole,
            "num_global_key_value_heads": heads[full],
            "attention_k_eq_v": m.tensor(f"blk.{full}.attn_v.weight") is None,
            "num_kv_shared_layers": m.integer("attention.shared_kv_layers", 0),
            "use_double_wide_mlp": inner[-1] != inner[0],
            "hidden_size_per_layer_input": m.integer("embedding_length_per_layer_input", 0),
            "vocab_size_per_layer_input": table.shape[0] if table else 0,
            "enable_moe_block": experts > 0,
            "rope_parameters": {"sliding_attention": _rope_of_windows(m, head_dim), "full_attention": _rope(m)},
        }
        | {ours: m.integer(theirs) for ours, theirs in EXPERTS.items() if experts}
        | m.given(final_logit_softcapping="final_logit_softcapping")
    )


def _rope_of_windows(m: Metadata, head_dim: int) -> dict[str, Any]:
    part = m.integer("rope.dimension_count_swa", head_dim) / max(head_dim, 1)
    return {
        "rope_type": "default",
        "rope_theta": m.number("rope.freq_base_swa", 10000.0),
        "partial_rotary_factor": math.nextafter(part, 2),
    }


def _rope(m: Metadata) -> dict[str, Any]:
    """Frequencies of full attention are divided by 1, or by so much that what is left does not rotate."""
    rope = {"rope_type": "default", "rope_theta": m.number("rope.freq_base", 10000.0)}
    if (factors := m.vector("rope_freqs.weight")) is None:
        return rope
    rotated = factors.count(1.0)
    if any(one < NOT_ROTATED / 2 for one in factors[rotated:]):
        raise FatalError(f"{m.file}: rope_freqs.weight has to have ones, and {NOT_ROTATED} behind them", MODEL)
    part = math.nextafter(rotated / max(len(factors), 1), 2)
    return rope | {"rope_type": "proportional", "partial_rotary_factor": part}
