"""GLM-4.5 and GLM-4.6, also Air."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import CORRECTION, DECODER, EXPERTS, QK_NORM, SHARED_EXPERTS, SIGMOID, experts, layer, routed_keys
from ._common import config as common

TENSORS = (
    DECODER
    | QK_NORM
    | EXPERTS
    | SHARED_EXPERTS
    | layer(post_attention_norm="post_attention_layernorm", exp_probs_b="mlp.gate")
)
ENDINGS = CORRECTION
WRITES = ("glm4_moe",)


def config(m: Metadata) -> dict[str, Any]:
    keys, further = common(m), m.integer("nextn_predict_layers", 0)
    return (
        keys
        | experts(m)
        | {
            "model_type": "glm4_moe",
            "num_hidden_layers": keys["num_hidden_layers"]
            - further,  # the metadata count those that predict more tokens
            "num_nextn_predict_layers": further,
            "n_routed_experts": m.integer("expert_count"),
            "n_shared_experts": m.integer("expert_shared_count", 1),
            "n_group": m.integer("expert_group_count", 1),
            "topk_group": m.integer("expert_group_used_count", 1),
            "first_k_dense_replace": m.integer("leading_dense_block_count", 0),
            "routed_scaling_factor": m.number("expert_weights_scale", 1.0),
            "norm_topk_prob": m.flag("expert_weights_norm", True),
            "attention_bias": m.tensor("blk.0.attn_q.bias") is not None,
            "use_qk_norm": m.tensor("blk.0.attn_q_norm.weight") is not None,
        }
    )


def keys(raw: dict[str, Any]) -> dict[str, Any]:
    return routed_keys(raw) | {"expert_gating_func": SIGMOID}
