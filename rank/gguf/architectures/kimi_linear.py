"""Kimi Linear: DeepSeek-V3's entries, and those of Kimi delta attention in the layers that have it, which the tensors
tell. llama.cpp's converter writes neither groups of experts nor whether experts' weights are normalised: the models
there are have one group, and normalise."""

from __future__ import annotations

import math
from typing import Any

from ....errors import MODEL, FatalError
from ..metadata import Metadata
from . import deepseek2
from ._common import layer

DELTA = {
    "ssm_a": "A_log", "ssm_dt.bias": "dt_bias", "ssm_f_a": "f_a_proj", "ssm_f_b": "f_b_proj", "ssm_beta": "b_proj",
    "ssm_g_a": "g_a_proj", "ssm_g_b": "g_b_proj", "ssm_norm": "o_norm",
} | {f"ssm_conv1d_{one}": f"{one}_conv1d" for one in "qkv"}  # fmt: skip
TENSORS = deepseek2.TENSORS | layer(**{theirs: f"self_attn.{ours}" for theirs, ours in DELTA.items()})
ENDINGS = deepseek2.ENDINGS
LOGARITHMS = ("ssm_a",)
ONES = {"ssm_a": (0, 1, 3)} | {f"ssm_conv1d_{one}": (1,) for one in "qkv"}
NAME = "kimi-linear"


def config(m: Metadata) -> dict[str, Any]:
    keys = deepseek2.config(m)
    decays = [m.tensor(f"blk.{i}.ssm_a") for i in range(keys["num_hidden_layers"])]
    shape = next((one.shape for one in decays if one is not None), None)
    if shape is None:
        raise FatalError(f"{m.file} has no layer with Kimi delta attention: tensors ssm_a are missing", MODEL)
    return keys | {
        "model_type": "kimi_linear",
        "layer_types": ["full_attention" if one is None else "linear_attention" for one in decays],
        "linear_num_heads": math.prod(shape),
        "linear_head_dim": m.integer("kda.head_dim"),
        "linear_conv_kernel_dim": m.integer("ssm.conv_kernel"),
        "n_group": m.integer("expert_group_count", 1),
        "topk_group": m.integer("expert_group_used_count", 1),
        "norm_topk_prob": m.flag("expert_weights_norm", True),
    }
