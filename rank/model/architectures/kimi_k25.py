"""Kimi K2.5 and K2.6 (Moonshot AI 2026), of which the text model, Kimi K2, is served."""

from __future__ import annotations

from .. import base
from . import deepseek_v3

CONFIG = {"text_type": "deepseek_v3"}

Args = deepseek_v3.Args


class Model(base.TextOfMultimodal, deepseek_v3.Model):
    RENAMED = {"model.blocks.": "model.layers."}  # as transformers saves them
    LEFT_OUT = base.TextOfMultimodal.LEFT_OUT + ("mm_projector.",)
