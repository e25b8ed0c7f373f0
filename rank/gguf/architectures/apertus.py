"""Apertus. The parameters of its activation are in the metadata."""

from __future__ import annotations

from typing import Any

from ....errors import MODEL, FatalError
from ..metadata import Metadata
from ._common import DECODER, QK_NORM, layer
from ._common import config as common

TENSORS = DECODER | QK_NORM | layer(attn_norm="attention_layernorm", ffn_norm="feedforward_layernorm")
PER_LAYER = {f"xielu.alpha_{one}": f"model.layers.{{}}.mlp.act_fn.alpha_{one}" for one in "pn"}
BETA = 0.5  # of all models there are
FIXED = {"xielu.beta": BETA, "xielu.eps": -1e-6}
WRITES = ("apertus",)


def config(m: Metadata) -> dict[str, Any]:
    given = m.values.get("xielu.beta", BETA)
    betas = set(given) if isinstance(given, list) else {given}
    if betas != {BETA}:
        raise FatalError(f"{m.file}: the metadata's xielu.beta is {given!r}; {BETA} is supported", MODEL)
    return common(m) | {"model_type": "apertus", "attention_bias": m.tensor("blk.0.attn_q.bias") is not None}
