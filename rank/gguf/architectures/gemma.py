"""Gemma."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import DECODER
from ._common import config as common

TENSORS = DECODER
ADDED = 1.0
WRITES = ("gemma",)


def config(m: Metadata) -> dict[str, Any]:
    return common(m) | {"model_type": "gemma"}
