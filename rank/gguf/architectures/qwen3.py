"""Qwen3, dense."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import DECODER, QK_NORM
from ._common import config as common

TENSORS = DECODER | QK_NORM
WRITES = ("qwen3",)


def config(m: Metadata) -> dict[str, Any]:
    return common(m) | {"model_type": "qwen3"}
