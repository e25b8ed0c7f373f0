"""GLM-5.3 Flash (Zhipu AI 2026), of which the text model is served."""

from __future__ import annotations

from .. import base
from . import glm5_next_text

CONFIG = {"text_type": "glm5_next_text"}

Args = glm5_next_text.Args


class Model(base.TextOfMultimodal, glm5_next_text.Model):
    LEFT_OUT = "model.visual.", "visual."
