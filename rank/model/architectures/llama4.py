"""Llama 4 Scout and Maverick (Meta 2025), of which the text model is served."""

from __future__ import annotations

from .. import base
from . import llama4_text

CONFIG = {"text_type": "llama4_text"}

Args = llama4_text.Args


class Model(base.TextOfMultimodal, llama4_text.Model):
    LEFT_OUT = "vision_model.", "multi_modal_projector.", "model.vision_model.", "model.multi_modal_projector."
