"""Qwen2-VL (Qwen team 2024, arXiv 2409.12191): Qwen2 that sees."""

from __future__ import annotations

from ..vision import qwen2_vl
from . import qwen2_5_vl

CONFIG = {"text_type": "qwen2_vl_text"}

Args = qwen2_5_vl.Args


class Model(qwen2_5_vl.Model):
    TOWER = qwen2_vl.Tower
