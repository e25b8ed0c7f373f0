"""Qwen3-VL, dense, the text model; images need a mmproj file."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import DECODER, QK_NORM, sections
from ._common import config as common

TENSORS = DECODER | QK_NORM


def config(m: Metadata) -> dict[str, Any]:
    return sections(m, common(m), interleaved=True) | {"model_type": "qwen3"}
