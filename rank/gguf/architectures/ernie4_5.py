"""ERNIE 4.5, dense: it rotates neighbours itself, so that files have its rows in their own order."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import DECODER
from ._common import config as common

TENSORS = DECODER
WRITES = ("ernie4_5",)


def config(m: Metadata) -> dict[str, Any]:
    return common(m) | {"model_type": "ernie4_5", "use_bias": m.tensor("blk.0.attn_q.bias") is not None}
