"""DeepSeek V2, V3 and R1, also Kimi K2, Moonlight, GLM-4.7-Flash and Mistral Large 3: all with latent attention.

Newer files have what goes from a latent to keys and values in two tensors, which llama.cpp multiplies with as they are:
of each head [latent, nope] and [value, latent]. `attention.key_length` is there the latent's, not a head's.
"""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import CORRECTION, DECODER, EXPERTS, SHARED_EXPERTS, SIGMOID, experts, layer, routed_keys
from ._common import config as common

TENSORS = (
    DECODER
    | EXPERTS
    | SHARED_EXPERTS
    | layer(
        attn_q_a="self_attn.q_a_proj",
        attn_q_a_norm="self_attn.q_a_layernorm",
        attn_q_b="self_attn.q_b_proj",
        attn_kv_a_mqa="self_attn.kv_a_proj_with_mqa",
        attn_kv_a_norm="self_attn.kv_a_layernorm",
        attn_kv_b="self_attn.kv_b_proj",
        attn_k_b="self_attn.k_b_proj",
        attn_v_b="self_attn.v_b_proj",
        exp_probs_b="mlp.gate",
    )
)
ENDINGS = CORRECTION
WRITES = "deepseek_v2", "deepseek_v3", "kimi_k2"  # in the older form
# Groups of experts and how many of them a token visits, of models whose older files lack both: by their experts.
GROUPS = {160: (8, 3), 256: (8, 4)}


def config(m: Metadata) -> dict[str, Any]:
    keys = common(m)
    rotated = m.integer("rope.dimension_count")
    key, value = m.integer("attention.key_length"), m.integer("attention.value_length")
    further = m.integer("nextn_predict_layers", 0)
    del keys["head_dim"]
    return (
        keys
        | experts(m)
        | _router(m)
        | {
            "num_hidden_layers": keys["num_hidden_layers"] - further,
            "num_nextn_predict_layers": further,
            "num_key_value_heads": keys["num_attention_heads"],
            "q_lora_rank": m.integer("attention.q_lora_rank", 0) or None,
            "kv_lora_rank": m.integer("attention.kv_lora_rank"),
            "qk_nope_head_dim": m.integer("attention.key_length_mla", key) - rotated,
            "qk_rope_head_dim": rotated,
            "v_head_dim": m.integer("attention.value_length_mla", value),
            "first_k_dense_replace": m.integer("leading_dense_block_count", 0),
            "rope_parameters": _rope(m, keys["rope_parameters"]),
        }
    )


def _router(m: Metadata) -> dict[str, Any]:
    """A correction of the choice is there in files of all models that choose by sigmoids, and in those alone."""
    number = m.integer("expert_count")
    corrected = any(m.tensor(f"blk.{i}.exp_probs_b.bias") for i in range(m.integer("block_count")))
    sigmoid = m.integer("expert_gating_func", SIGMOID if corrected else 1) == SIGMOID
    groups, chosen = (1, 1) if m.has("expert_group_count") else GROUPS.get(number, (1, 1))
    groups, chosen = m.integer("expert_group_count", groups), m.integer("expert_group_used_count", chosen)
    method = "noaux_tc" if sigmoid else "group_limited_greedy" if groups > 1 else "greedy"
    softmax = "mistral4" if m.has("attention.temperature_scale") else "deepseek_v2"
    return {
        "model_type": "deepseek_v3" if sigmoid else softmax,
        "scoring_func": "sigmoid" if sigmoid else "softmax",
        "topk_method": method,
        "n_routed_experts": number,
        "n_shared_experts": m.integer("expert_shared_count"),
        "n_group": groups,
        "topk_group": chosen,
        "norm_topk_prob": m.flag("expert_weights_norm", False),
        "routed_scaling_factor": m.number("expert_weights_scale", 1.0),
    }


def _rope(m: Metadata, rope: dict[str, Any]) -> dict[str, Any]:
    """All of the key that is rotated, which `common` takes for a part of a head, is a head to the model.

    Of YaRN, files have a tenth of mscale_all_dim; mscale is the same in all models there are.
    """
    rope = {key: value for key, value in rope.items() if key != "partial_rotary_factor"}
    if m.has("rope.scaling.yarn_log_multiplier"):
        mscale = round(10 * m.number("rope.scaling.yarn_log_multiplier"), 6)
        rope |= {"mscale": mscale, "mscale_all_dim": mscale}
    if m.has("attention.temperature_scale"):
        rope |= {"llama_4_scaling_beta": m.number("attention.temperature_scale")}
    return rope


def keys(raw: dict[str, Any]) -> dict[str, Any]:
    rotated, rope = raw["qk_rope_head_dim"], raw["rope_parameters"]
    found = routed_keys(raw) | {
        "attention.key_length": raw["qk_nope_head_dim"] + rotated,
        "attention.value_length": raw["v_head_dim"],
        "attention.kv_lora_rank": raw["kv_lora_rank"],
        "rope.dimension_count": rotated,
        "expert_gating_func": SIGMOID if raw["scoring_func"] == "sigmoid" else 1,
    }
    if raw["topk_method"] == "greedy":
        found |= {"expert_group_count": 1, "expert_group_used_count": 1}
    if raw.get("q_lora_rank"):
        found["attention.q_lora_rank"] = raw["q_lora_rank"]
    if rope.get("mscale_all_dim"):
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return found
