"""StarCoder 2. Files do not hold its sliding window: layers attend to all of the context."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import DECODER, layer
from ._common import config as common

TENSORS = DECODER | layer(ffn_up="mlp.c_fc", ffn_down="mlp.c_proj")
WRITES = ("starcoder2",)


def config(m: Metadata) -> dict[str, Any]:
    return common(m) | {"model_type": "starcoder2", "use_bias": m.tensor("blk.0.attn_q.bias") is not None}
