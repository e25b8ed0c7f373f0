"""MiniMax-M3 (MiniMax 2026), of which the text model is served."""

from __future__ import annotations

from .. import base
from . import minimax_m3_vl_text

CONFIG = {"text_type": "minimax_m3_vl_text"}

Args = minimax_m3_vl_text.Args


class Model(base.TextOfMultimodal, minimax_m3_vl_text.Model):
    LEFT_OUT = base.TextOfMultimodal.LEFT_OUT + ("patch_merge_mlp.",)
