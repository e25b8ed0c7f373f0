"""Granite 4 with Mamba-2 layers, dense and with experts. Those without such layers are `granite` and `granitemoe`."""

from __future__ import annotations

from typing import Any

from ....errors import MODEL, FatalError
from ..metadata import Metadata
from . import _mamba2, granite
from ._common import EXPERTS, SHARED_EXPERTS, layer

TENSORS = (
    granite.TENSORS
    | _mamba2.tensors("mamba")
    | EXPERTS
    | SHARED_EXPERTS
    | layer(**{f"ffn_{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")})  # without experts
)
PAIRED = granite.PAIRED  # though heads are not rotated
LOGARITHMS, ONES, FLAT = _mamba2.LOGARITHMS, _mamba2.ONES, _mamba2.FLAT


def config(m: Metadata) -> dict[str, Any]:
    if m.flag("rope.scaling.finetuned", False):
        raise FatalError(f"{m.file}: granitehybrid models that rotate heads, such as Bamba, are not supported", MODEL)
    keys = granite.config(m)
    nets = _mamba2.layers(m, keys["num_hidden_layers"])
    heads, wide = _mamba2.heads(m)
    if heads * wide % keys["hidden_size"]:
        raise FatalError(f"{m.file}: its ssm.inner_size of {heads * wide} is no multiple of embedding_length", MODEL)
    experts = m.integer("expert_count", 0)
    return keys | {
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba" if i in nets else "attention" for i in range(keys["num_hidden_layers"])],
        "position_embedding_type": None,
        "shared_intermediate_size": m.integer("expert_shared_feed_forward_length", keys["intermediate_size"]),
        "num_local_experts": experts,
        "num_experts_per_tok": m.integer("expert_used_count") if experts else 0,
        "mamba_n_heads": heads,
        "mamba_d_head": wide,
        "mamba_n_groups": m.integer("ssm.group_count"),
        "mamba_d_state": m.integer("ssm.state_size"),
        "mamba_d_conv": m.integer("ssm.conv_kernel"),
        "mamba_expand": heads * wide // keys["hidden_size"],
        "mamba_conv_bias": _mamba2.has_bias(m, nets[0], "ssm_conv1d"),
        "mamba_proj_bias": _mamba2.has_bias(m, nets[0], "ssm_in"),
    }
