"""What many architectures have in common in GGUF files."""

from __future__ import annotations

import math
from typing import Any

from ....errors import MODEL, FatalError
from ..metadata import Metadata

ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# Factors on rope frequencies: config.json has them.
UNREAD = {"rope_freqs": "", "rope_factors_long": "", "rope_factors_short": ""}


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
DECODER = ENDS | UNREAD | ATTENTION | MLP | NORMS
EXPERTS = layer(
    ffn_gate_inp="mlp.gate",
    ffn_gate_exps="mlp.experts.gate_proj",
    ffn_up_exps="mlp.experts.up_proj",
    ffn_down_exps="mlp.experts.down_proj",
)


def config(m: Metadata) -> dict[str, Any]:
    """The keys of config.json that all architectures have."""
    embedding = m.tensor("token_embd.weight")
    if embedding is None:
        raise FatalError(f"{m.file} has no tensor token_embd.weight", MODEL)
    heads, hidden, layers = m.integer("attention.head_count"), m.integer("embedding_length"), m.integer("block_count")
    # These count what is made of the model before its tensors are checked.
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
        "num_key_value_heads": m.integer("attention.head_count_kv", heads),
        "head_dim": m.integer("attention.key_length", hidden // heads),
        "intermediate_size": m.integer("feed_forward_length"),
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
    found: dict[str, Any] = {"rope_theta": m.number("rope.freq_base", 10000.0)}
    head_dim = m.integer("attention.key_length", m.integer("embedding_length") // m.integer("attention.head_count"))
    rotated = m.integer("rope.dimension_count", head_dim)
    if m.has("rope.dimension_count"):
        found["partial_rotary_factor"] = math.nextafter(rotated / max(head_dim, 1), 2)  # which is rounded down again
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
