"""Qwen2 and Qwen2.5, dense."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import DECODER
from ._common import config as common

TENSORS = DECODER
WRITES = ("qwen2",)


def config(m: Metadata) -> dict[str, Any]:
    return common(m) | {"model_type": "qwen2"}
