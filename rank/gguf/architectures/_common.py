"""Entries that many architectures share in GGUF files."""

from __future__ import annotations

import math
from typing import Any

from ....errors import MODEL, FatalError
from ..metadata import Metadata

ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# Factors on rope frequencies: config.json has them.
UNREAD = {"rope_freqs": "", "rope_factors_long": "", "rope_factors_short": ""}
SIGMOID = 2  # of expert_gating_func
CORRECTION = {"exp_probs_b.bias": "e_score_correction_bias"}  # ends of the tensors that correct a choice of experts


def layer(**names: str) -> dict[str, str]:
    """Names of a layer's tensors: GGUF's and, behind the layer's number, the checkpoint's."""
    return {f"blk.{{}}.{theirs}": f"model.layers.{{}}.{ours}" for theirs, ours in names.items()}


ATTENTION = layer(
    attn_q="self_attn.q_proj", attn_k="self_attn.k_proj", attn_v="self_attn.v_proj", attn_output="self_attn.o_proj"
)
QK_NORM = layer(attn_q_norm="self_attn.q_norm", attn_k_norm="self_attn.k_norm")
MLP = layer(ffn_gate="mlp.gate_proj", ffn_up="mlp.up_proj", ffn_down="mlp.down_proj")
NORMS = layer(attn_norm="input_layernorm", ffn_norm="post_attention_layernorm")
FOUR_NORMS = layer(
    attn_norm="input_layernorm",
    post_attention_norm="post_attention_layernorm",
    ffn_norm="pre_feedforward_layernorm",
    post_ffw_norm="post_feedforward_layernorm",
)
# Layers that predict further tokens, which are not read, are known by their numbers.
FURTHER = layer(**{
    f"nextn.{theirs}": ours
    for theirs, ours in {
        "eh_proj": "eh_proj", "embed_tokens": "embed_tokens", "enorm": "enorm", "hnorm": "hnorm",
        "shared_head_head": "shared_head.head", "shared_head_norm": "shared_head.norm",
    }.items()
})  # fmt: skip
DECODER = ENDS | UNREAD | ATTENTION | MLP | NORMS | FURTHER
EXPERTS = layer(
    ffn_gate_inp="mlp.gate",
    ffn_gate_exps="mlp.experts.gate_proj",
    ffn_up_exps="mlp.experts.up_proj",
    ffn_down_exps="mlp.experts.down_proj",
    ffn_gate_up_exps="mlp.experts.gate_up_proj",
)

SHARED_EXPERTS = layer(
    ffn_gate_shexp="mlp.shared_experts.gate_proj",
    ffn_up_shexp="mlp.shared_experts.up_proj",
    ffn_down_shexp="mlp.shared_experts.down_proj",
)


def config(m: Metadata, **known: int) -> dict[str, Any]:
    """The keys of config.json that all architectures have. known: those whose numbers differ from layer to layer."""
    embedding = m.tensor("token_embd.weight")
    if embedding is None:
        raise FatalError(f"{m.file} has no tensor token_embd.weight", MODEL)
    heads, hidden, layers = m.integer("attention.head_count"), m.integer("embedding_length"), m.integer("block_count")
    # Keys that size the model before its tensors are checked.
    if embedding.shape[1:] != (hidden,):
        raise FatalError(f"{m.file}: token_embd.weight is not as wide as the embedding_length of {hidden}", MODEL)
    if not 1 <= heads <= hidden:
        raise FatalError(f"{m.file}: {heads} attention heads cannot share an embedding_length of {hidden}", MODEL)
    if not 1 <= layers <= m.num_tensors:
        raise FatalError(f"{m.file} has {layers} layers by its metadata, but {m.num_tensors} tensors", MODEL)
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": known.get("num_key_value_heads") or m.integer("attention.head_count_kv", heads),
        "head_dim": m.integer("attention.key_length", hidden // heads),
        "intermediate_size": known.get("intermediate_size")
        or m.integer("feed_forward_length", 0 if m.has("expert_feed_forward_length") else None),
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": m.integer("context_length"),
        "tie_word_embeddings": m.tensor("output.weight") is None,
        "rope_parameters": rope(m),
    } | m.given(
        rms_norm_eps="attention.layer_norm_rms_epsilon",
        layer_norm_eps="attention.layer_norm_epsilon",
    )


def experts(m: Metadata) -> dict[str, Any]:
    """The keys of models with experts, as most of them have them."""
    return {
        "num_experts": m.integer("expert_count"),
        "num_experts_per_tok": m.integer("expert_used_count"),
        "moe_intermediate_size": m.integer("expert_feed_forward_length"),
    }


def rope(m: Metadata) -> dict[str, Any]:
    """rope_parameters. The factors of Llama 3's rope are in a tensor, one for each frequency, as LongRoPE has them."""
    head_dim = m.integer("attention.key_length", m.integer("embedding_length") // m.integer("attention.head_count"))
    rotated = m.integer("rope.dimension_count", head_dim)  # config.json's default may be a part of the head
    found: dict[str, Any] = {
        "rope_theta": m.number("rope.freq_base", 10000.0),
        "partial_rotary_factor": math.nextafter(rotated / max(head_dim, 1), 2),  # which is rounded down again
    }
    kind = m.text("rope.scaling.type", "none")
    original = m.integer("rope.scaling.original_context_length", m.integer("context_length"))
    if (factors := m.vector("rope_freqs.weight")) is not None:
        found |= {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
        found["original_max_position_embeddings"] = original
    elif (short := m.vector("rope_factors_short.weight")) is not None:
        long = m.vector("rope_factors_long.weight") or short
        found |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        found["original_max_position_embeddings"] = original
        found["attention_factor"] = m.number("rope.scaling.attn_factor", 1.0)
    elif kind == "linear":
        found |= {"rope_type": "linear", "factor": m.number("rope.scaling.factor")}
    elif kind == "yarn":
        found |= {"rope_type": "yarn", "factor": m.number("rope.scaling.factor")}
        found["original_max_position_embeddings"] = original
        found |= m.given(beta_fast="rope.scaling.yarn_beta_fast", beta_slow="rope.scaling.yarn_beta_slow")
    elif kind == "none" and (factor := m.number("rope.scale_linear", 1.0)) != 1.0:  # files of 2023
        found |= {"rope_type": "linear", "factor": factor}
    elif kind != "none":
        raise FatalError(f"{m.file}: the metadata's {m.architecture}.rope.scaling.type is {kind!r}, not known", MODEL)
    return found


def sections(m: Metadata, keys: dict[str, Any], interleaved: bool = False) -> dict[str, Any]:
    """keys, with how rotary dimensions are divided among axes of images in rope_parameters."""
    found = m.values.get(f"{m.architecture}.rope.dimension_sections")
    if found is None:
        return keys
    if not isinstance(found, list) or len(found) < 3:
        raise FatalError(f"{m.file}: the metadata's {m.architecture}.rope.dimension_sections is {found!r}", MODEL)
    axes = {"mrope_section": found[:3]} | ({"mrope_interleaved": True} if interleaved else {})
    return keys | {"rope_parameters": keys["rope_parameters"] | axes}


def keys(raw: dict[str, Any]) -> dict[str, Any]:
    """The reverse of `config`: the metadata, without the architecture's name in front, of config.json as it is read."""
    dim, heads = head_dim(raw), raw["num_attention_heads"]
    named = {
        "attention.layer_norm_rms_epsilon": raw.get("rms_norm_eps"),
        "attention.layer_norm_epsilon": raw.get("layer_norm_eps"),
    }
    return {
        "context_length": raw["max_position_embeddings"],
        "embedding_length": raw["hidden_size"],
        "block_count": raw["num_hidden_layers"],
        "feed_forward_length": raw["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": raw.get("num_key_value_heads") or heads,
        "attention.key_length": dim,
        "attention.value_length": dim,
        "vocab_size": raw["vocab_size"],
    } | {key: float(value) for key, value in named.items() if value is not None}


def expert_keys(raw: dict[str, Any]) -> dict[str, Any]:
    """The reverse of `experts`."""
    inner = {"expert_feed_forward_length": raw["moe_intermediate_size"]} if raw.get("moe_intermediate_size") else {}
    return inner | {
        "expert_count": raw.get("num_experts") or raw["num_local_experts"],
        "expert_used_count": raw["num_experts_per_tok"],
    }


def routed_keys(raw: dict[str, Any]) -> dict[str, Any]:
    """Keys of models with shared experts and dense first layers. raw has the model's defaults."""
    return {
        "expert_count": raw["n_routed_experts"],
        "expert_used_count": raw["num_experts_per_tok"],
        "expert_feed_forward_length": raw["moe_intermediate_size"],
        "expert_shared_count": raw["n_shared_experts"],
        "expert_group_count": raw["n_group"],
        "expert_group_used_count": raw["topk_group"],
        "leading_dense_block_count": raw["first_k_dense_replace"],
        "expert_weights_scale": float(raw["routed_scaling_factor"]),
        "expert_weights_norm": bool(raw["norm_topk_prob"]),
    }


def head_dim(raw: dict[str, Any]) -> int:
    return int(raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"])


def rope_keys(raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """The reverse of `rope`: keys, and vectors by their names. Raises FatalError where files cannot hold it."""
    given = raw.get("rope_parameters") or {}
    given = given.get("full_attention", given)
    dim, base = head_dim(raw), float(given.get("rope_theta", 10000.0))
    found: dict[str, Any] = {"rope.freq_base": base}
    partial = given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    rotated = int(dim * partial) if partial else dim
    if partial:
        found["rope.dimension_count"] = rotated
    kind = given.get("rope_type", "default")
    original = given.get("original_max_position_embeddings", raw["max_position_embeddings"])
    if kind == "llama3":
        return found, {"rope_freqs.weight": _llama3(given, rotated, base, original)}
    if kind in ("longrope", "su"):
        stretch = raw["max_position_embeddings"] / original
        usual = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
        found["rope.scaling.original_context_length"] = original
        found["rope.scaling.attn_factor"] = float(given.get("attention_factor") or usual)
        return found, {f"rope_factors_{one}.weight": given[f"{one}_factor"] for one in ("long", "short")}
    if kind in ("linear", "yarn"):
        found |= {"rope.scaling.type": kind, "rope.scaling.factor": float(given["factor"])}
    if kind == "yarn":
        found["rope.scaling.original_context_length"] = original
        betas = {f"rope.scaling.yarn_{one}": given.get(one) for one in ("beta_fast", "beta_slow")}
        found |= {key: float(value) for key, value in betas.items() if value is not None}
    elif kind not in ("default", "linear"):
        raise FatalError(f"GGUF files cannot say a rope of the type {kind!r}", MODEL)
    return found, {}


def _llama3(given: dict[str, Any], rotated: int, base: float, original: int) -> list[float]:
    """The divisor of each rope frequency: long waves by the factor, short ones by 1."""
    factor, low, high = (float(given[one]) for one in ("factor", "low_freq_factor", "high_freq_factor"))
    found = []
    for at in range(0, rotated, 2):
        turns = original / (2 * math.pi * base ** (at / rotated))  # that the original context has
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        found.append(1 / ((1 - share) / factor + share))
    return found
