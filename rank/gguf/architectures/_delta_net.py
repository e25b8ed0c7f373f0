"""Entries that Qwen's models with gated delta nets share in GGUF files."""

from __future__ import annotations

from typing import Any

from ....errors import MODEL, FatalError
from ...safetensors_header import Order
from ..metadata import Metadata
from ._common import DECODER, QK_NORM, layer, sections
from ._common import config as common

TENSORS = (
    DECODER
    | QK_NORM
    | layer(
        post_attention_norm="post_attention_layernorm",
        attn_qkv="linear_attn.in_proj_qkv",
        attn_gate="linear_attn.in_proj_z",
        ssm_a="linear_attn.A_log",
        ssm_dt="linear_attn",
        ssm_conv1d="linear_attn.conv1d",
        ssm_norm="linear_attn.norm",
        ssm_out="linear_attn.out_proj",
    )
)
ENDINGS = {"ssm_dt.bias": "dt_bias"}
ADDED = 1.0
UNCHANGED = ("ssm_norm",)
LOGARITHMS = ("ssm_a",)
ONES = {"ssm_conv1d": (1,)}


def config(m: Metadata) -> dict[str, Any]:
    """`common`'s keys and the sizes of the nets. Which layers have one, the tensors tell."""
    keys, further = sections(m, common(m), interleaved=True), m.integer("nextn_predict_layers", 0)
    layers = keys["num_hidden_layers"] - further
    heads = m.integer("ssm.time_step_rank")
    values = m.integer("ssm.inner_size")
    if heads < 1 or values < 1 or values % heads:
        raise FatalError(f"{m.file}: {heads} heads of values cannot share an ssm.inner_size of {values}", MODEL)
    linear = [m.tensor(f"blk.{i}.ssm_a") is not None for i in range(layers)]
    return keys | {
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": further,
        "layer_types": ["linear_attention" if one else "full_attention" for one in linear],
        "linear_conv_kernel_dim": m.integer("ssm.conv_kernel"),
        "linear_num_key_heads": m.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": m.integer("ssm.state_size"),
        "linear_value_head_dim": values // heads,
        "attention_bias": any(m.tensor(f"blk.{i}.attn_q.bias") for i in range(layers)),
    }


def tiled(config: dict[str, Any]) -> dict[str, Order]:
    """The orders of files that have the first value head of each key head, then the second of each, and so on."""
    heads, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    each, wide = values // max(heads, 1), config["linear_value_head_dim"]
    if each < 2:
        return {}
    before = 2 * heads * config["linear_key_head_dim"]  # queries and keys
    rows, single = Order(each, heads, wide), Order(each, heads)
    behind = Order(each, heads, wide, before)
    return {
        "attn_qkv": behind,
        "ssm_conv1d": behind,
        "attn_gate": rows,
        "ssm_beta": single,
        "ssm_alpha": single,
        "ssm_a": single,
        "ssm_dt": single,
        "ssm_out": Order(each, heads, wide, columns=True),
    }


def keys(raw: dict[str, Any]) -> dict[str, Any]:
    """raw: with all sizes of the nets."""
    heads, wide = raw["linear_num_value_heads"], raw["linear_value_head_dim"]
    return {
        "ssm.conv_kernel": raw["linear_conv_kernel_dim"],
        "ssm.state_size": raw["linear_key_head_dim"],
        "ssm.group_count": raw["linear_num_key_heads"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * wide,
        "full_attention_interval": raw.get("full_attention_interval") or 4,
    }


def section_keys(raw: dict[str, Any]) -> dict[str, Any]:
    """How Qwen3.5's rotary dimensions are divided among axes of images: text has the same position on all."""
    sections = (raw.get("rope_parameters") or {}).get("mrope_section") or [11, 11, 10]
    return {"rope.dimension_sections": [*sections, 0]}
