"""Nemotron-H and Nemotron Nano 2: a layer is one sublayer, which its tensors tell. Heads are not rotated, so the order
in which files hold queries' and keys' elements does not matter."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from . import _mamba2
from ._common import ENDS, layer
from ._common import config as common

TENSORS = (
    ENDS
    | _mamba2.tensors("mixer")
    | layer(attn_norm="norm", attn_output="mixer.o_proj", ffn_up="mixer.up_proj", ffn_down="mixer.down_proj")
    | layer(**{f"attn_{one}": f"mixer.{one}_proj" for one in "qkv"})
)
LOGARITHMS, ONES, FLAT = _mamba2.LOGARITHMS, _mamba2.ONES, _mamba2.FLAT
KINDS = {"ssm_a": "mamba", "attn_q.weight": "attention", "ffn_up.weight": "mlp"}  # a tensor → its layer's type


def config(m: Metadata) -> dict[str, Any]:
    keys = common(m)
    layers = keys["num_hidden_layers"] - m.integer("nextn_predict_layers", 0)
    mamba = _mamba2.layers(m, layers)[0]
    types = [next((kind for name, kind in KINDS.items() if m.tensor(f"blk.{i}.{name}")), "moe") for i in range(layers)]
    mlp = types.index("mlp") if "mlp" in types else 0
    up = m.tensor(f"blk.{mlp}.ffn_up.weight")  # files with experts have their size in feed_forward_length
    heads, wide = _mamba2.heads(m)
    return keys | {
        "model_type": "nemotron_h",
        "num_hidden_layers": layers,
        "layer_types": types,
        "intermediate_size": up.shape[0] if up else keys["intermediate_size"],
        "mlp_bias": _mamba2.has_bias(m, mlp, "ffn_up"),
        "mamba_num_heads": heads,
        "mamba_head_dim": wide,
        "n_groups": m.integer("ssm.group_count"),
        "ssm_state_size": m.integer("ssm.state_size"),
        "conv_kernel": m.integer("ssm.conv_kernel"),
        "use_conv_bias": _mamba2.has_bias(m, mamba, "ssm_conv1d"),
        "use_bias": _mamba2.has_bias(m, mamba, "ssm_in"),
    }
