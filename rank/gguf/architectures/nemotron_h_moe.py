"""Nemotron 3: Nemotron-H with experts, which may be between two linears."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from . import nemotron_h
from ._common import CORRECTION, layer

TENSORS = nemotron_h.TENSORS | layer(
    ffn_gate_inp="mixer.gate",
    exp_probs_b="mixer.gate",
    ffn_up_exps="mixer.experts.up_proj",
    ffn_down_exps="mixer.experts.down_proj",
    ffn_up_shexp="mixer.shared_experts.up_proj",
    ffn_down_shexp="mixer.shared_experts.down_proj",
    ffn_latent_down="mixer.fc1_latent_proj",
    ffn_latent_up="mixer.fc2_latent_proj",
)
ENDINGS = CORRECTION
LOGARITHMS, ONES, FLAT = nemotron_h.LOGARITHMS, nemotron_h.ONES, nemotron_h.FLAT


def config(m: Metadata) -> dict[str, Any]:
    return nemotron_h.config(m) | {
        "n_routed_experts": m.integer("expert_count"),
        "num_experts_per_tok": m.integer("expert_used_count"),
        "moe_intermediate_size": m.integer("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": m.integer("expert_shared_feed_forward_length"),
        "moe_latent_size": m.integer("moe_latent_size", 0) or None,
        "n_group": m.integer("expert_group_count", 1),
        "topk_group": m.integer("expert_group_used_count", 1),
        "norm_topk_prob": m.flag("expert_weights_norm", True),
        "routed_scaling_factor": m.number("expert_weights_scale", 1.0),
    }
