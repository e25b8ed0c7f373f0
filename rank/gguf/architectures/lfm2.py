"""LFM2. Which layers have a convolution, the tensors tell."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import DECODER, QK_NORM, layer
from ._common import config as common

TENSORS = (
    DECODER
    | QK_NORM
    | {"token_embd_norm": "model.norm"}
    | layer(**{f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")})
)
ONES = {"conv": (1,)}


def config(m: Metadata) -> dict[str, Any]:
    keys = common(m)
    nets = [m.tensor(f"blk.{i}.shortconv.conv.weight") is not None for i in range(keys["num_hidden_layers"])]
    return keys | {
        "model_type": "lfm2",
        "layer_types": ["conv" if one else "full_attention" for one in nets],
        "conv_L_cache": m.integer("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }
