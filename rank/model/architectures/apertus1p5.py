"""Apertus 1.5 (Project Apertus 2026), of which the text model is served."""

from __future__ import annotations

from .. import base
from . import apertus1p5_text

CONFIG = {"text_type": "apertus1p5_text"}

Args = apertus1p5_text.Args


class Model(base.TextOfMultimodal, apertus1p5_text.Model):
    LEFT_OUT = "model.vision_tokenizer.", "model.audio_tokenizer."
