"""Qwen3.5 with vision (Qwen team 2026)."""

from __future__ import annotations

from dataclasses import dataclass

from .. import base
from ..vision import qwen2_5_vl, qwen3_5
from . import qwen3_5_text

CONFIG = {"text_type": "qwen3_5_text"}


@dataclass(frozen=True, kw_only=True)
class Args(base.SeeingArgs, qwen3_5_text.Args):
    pass


class Model(base.SeeingModel, qwen3_5_text.Model):
    PREFIXES = base.SeeingModel.PREFIXES | {"visual.": "vision.", "model.visual.": "vision."}
    TOWER = qwen3_5.Tower
    image_positions = staticmethod(qwen2_5_vl.positions)
