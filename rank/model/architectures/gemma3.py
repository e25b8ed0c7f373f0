"""Gemma 3 with vision (arXiv 2503.19786), of which the text model is served."""

from __future__ import annotations

from .. import base
from . import gemma3_text

CONFIG = {"text_type": "gemma3_text"}

Args = gemma3_text.Args


class Model(base.TextOfMultimodal, gemma3_text.Model):
    pass
