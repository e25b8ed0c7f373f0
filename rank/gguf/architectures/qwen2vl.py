"""Qwen2-VL and Qwen2.5-VL, the text model; images need a mmproj file."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from ._common import DECODER, sections
from ._common import config as common

TENSORS = DECODER


def config(m: Metadata) -> dict[str, Any]:
    return sections(m, common(m)) | {"model_type": "qwen2"}
