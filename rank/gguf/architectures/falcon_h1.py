"""Falcon-H1: files have all multipliers in the weights, and queries and keys in the model's order."""

from __future__ import annotations

from typing import Any

from ....errors import MODEL, FatalError
from ..metadata import Metadata
from . import _mamba2
from ._common import DECODER, layer
from ._common import config as common

# Files name that norm without an ending.
TENSORS = DECODER | _mamba2.tensors("mamba") | layer(ffn_norm="post_attention_layernorm.weight")
LOGARITHMS, ONES, FLAT = _mamba2.LOGARITHMS, _mamba2.ONES, _mamba2.FLAT
NAME = "falcon-h1"


def config(m: Metadata) -> dict[str, Any]:
    if m.has("ssm.has_mup"):
        raise FatalError(
            f"{m.file} is of an early converter: its weights lack falcon-h1's multipliers. Convert the model anew",
            MODEL,
        )
    if m.tensor("output.weight") is None:  # llama.cpp computes such files with logits of another temperature
        raise FatalError(
            f"{m.file} has no tensor output.weight: of falcon-h1 models with a tied head, files lack "
            "lm_head_multiplier. Serve the model's safetensors",
            MODEL,
        )
    keys = common(m)
    heads, wide = _mamba2.heads(m)
    net = _mamba2.layers(m, keys["num_hidden_layers"])[0]
    return keys | {
        "model_type": "falcon_h1",
        "attention_bias": _mamba2.has_bias(m, net, "attn_q"),
        "mlp_bias": _mamba2.has_bias(m, net, "ffn_up"),
        "mamba_d_ssm": heads * wide,
        "mamba_n_heads": heads,
        "mamba_d_head": wide,
        "mamba_n_groups": m.integer("ssm.group_count"),
        "mamba_d_state": m.integer("ssm.state_size"),
        "mamba_d_conv": m.integer("ssm.conv_kernel"),
        "mamba_conv_bias": _mamba2.has_bias(m, net, "ssm_conv1d"),
        "mamba_proj_bias": _mamba2.has_bias(m, net, "ssm_in"),
        "projectors_bias": _mamba2.has_bias(m, net, "ssm_out"),
        "mamba_rms_norm": m.tensor(f"blk.{net}.ssm_norm.weight") is not None,
        "mamba_norm_before_gate": False,  # as in the models there are; files do not say
    }
