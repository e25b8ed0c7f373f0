"""Qwen3.5 with experts and vision (Qwen team 2026)."""

from __future__ import annotations

from dataclasses import dataclass

from .. import base
from . import qwen3_5, qwen3_5_moe_text

CONFIG = {"text_type": "qwen3_5_moe_text"}


@dataclass(frozen=True, kw_only=True)
class Args(base.SeeingArgs, qwen3_5_moe_text.Args):
    pass


class Model(base.SeeingModel, qwen3_5_moe_text.Model):
    PREFIXES, TOWER = qwen3_5.Model.PREFIXES, qwen3_5.Model.TOWER
    image_positions = staticmethod(qwen3_5.Model.image_positions)
