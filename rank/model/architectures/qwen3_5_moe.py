"""Qwen3.5 with experts and vision (Qwen team 2026), of which the text model is served."""

from __future__ import annotations

from .. import base
from . import qwen3_5, qwen3_5_moe_text

CONFIG = {"text_type": "qwen3_5_moe_text"}

Args = qwen3_5_moe_text.Args


class Model(base.TextOfMultimodal, qwen3_5_moe_text.Model):
    LEFT_OUT = qwen3_5.Model.LEFT_OUT
