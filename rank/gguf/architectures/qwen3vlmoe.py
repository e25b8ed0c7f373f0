"""Qwen3-VL with experts, the text model; images need a mmproj file."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from . import qwen3moe
from ._common import sections

TENSORS = qwen3moe.TENSORS


def config(m: Metadata) -> dict[str, Any]:
    return sections(m, qwen3moe.config(m), interleaved=True)
