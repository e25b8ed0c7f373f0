"""Qwen3-VL, dense (Qwen team 2025, arXiv 2511.21631): Qwen3 that sees."""

from __future__ import annotations

from dataclasses import dataclass

from .. import base
from . import qwen3, qwen3_5

CONFIG = {"text_type": "qwen3_vl_text", "defaults": {"head_dim": 128}}


@dataclass(frozen=True, kw_only=True)
class Args(base.SeeingArgs, qwen3.Args):
    pass


class Model(base.SeeingModel, qwen3.Model):
    PREFIXES, TOWER = qwen3_5.Model.PREFIXES, qwen3_5.Model.TOWER
    image_positions = staticmethod(qwen3_5.Model.image_positions)
