"""Qwen3.5 with vision (Qwen team 2026), of which the text model is served."""

from __future__ import annotations

from .. import base
from . import qwen3_5_text

CONFIG = {"text_type": "qwen3_5_text"}

Args = qwen3_5_text.Args


class Model(base.TextOfMultimodal, qwen3_5_text.Model):
    LEFT_OUT = "visual.", "model.visual."
