"""Qwen2.5-VL (Qwen team 2025, arXiv 2502.13923): Qwen2.5 that sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .. import base
from ..vision import qwen2_5_vl
from . import qwen2

CONFIG = {"text_type": "qwen2_5_vl_text"}


@dataclass(frozen=True, kw_only=True)
class Args(base.SeeingArgs, qwen2.Args):
    pass


class Model(base.SeeingModel, qwen2.Model):
    PREFIXES = base.SeeingModel.PREFIXES | {"visual.": "vision.", "model.visual.": "vision."}
    MERGED = qwen2.Model.MERGED | {"qkv": ("q", "k", "v")}  # as GGUF files have them
    TOWER: ClassVar[type[base.Tower]] = qwen2_5_vl.Tower
    image_positions = staticmethod(qwen2_5_vl.positions)
